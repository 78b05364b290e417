"""A command group that means one of its commands when none is named. Must not know the commands."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


def group_with_default(name: str) -> type[TyperGroup]:
    """A group class: `metalslots bench --url ...` then means `metalslots bench run --url ...`."""

    class _Group(TyperGroup):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
                args = [name, *args]
            return super().parse_args(ctx, args)

    return _Group
