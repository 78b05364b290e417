"""The command `metalslots`: one module per command.

Nothing here imports Ray or MLX before it is needed, so that --help is quick.
"""
