"""A fleet on a virtual clock: the real routing policy against other rules, with Macs that are a few formulas."""
