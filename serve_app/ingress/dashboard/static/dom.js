// Elements from plain calls, and updating a page in place so that focus, selection and scrolling stay where they are.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "path", "line", "rect", "g", "text", "circle", "title"]);

// h("li", {class: "slot", title: "..."}, "text", otherElement). A `style` is an object: the page's security policy
// allows no style attributes in markup.
export function h(tag, properties = {}, ...children) {
  const element = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value == null || value === false) continue;
    if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child != null && child !== false));
  return element;
}

// Make the children of `target` like `fresh`, changing as little as possible.
export function show(target, ...fresh) {
  morphChildren(target, fresh.flat().filter((node) => node != null && node !== false).map(asNode));
}

function asNode(value) {
  return value instanceof Node ? value : document.createTextNode(String(value));
}

function morphChildren(target, fresh) {
  const old = [...target.childNodes];
  fresh.forEach((node, place) => {
    const previous = old[place];
    if (!previous) target.append(node);
    else if (isAlike(previous, node)) morph(previous, node);
    else previous.replaceWith(node);
  });
  for (const extra of old.slice(fresh.length)) extra.remove();
}

function isAlike(one, other) {
  return one.nodeType === other.nodeType && one.nodeName === other.nodeName &&
    (one.nodeType !== Node.ELEMENT_NODE || one.getAttribute("data-key") === other.getAttribute("data-key"));
}

function morph(old, fresh) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  for (const { name } of [...old.attributes]) {
    if (name !== "style" && !fresh.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (name !== "style" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  if (old.style.cssText !== fresh.style.cssText) old.style.cssText = fresh.style.cssText;
  morphChildren(old, [...fresh.childNodes]);
}
