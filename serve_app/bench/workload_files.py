"""Finds and reads workload files. Must not know what a workload means."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from engine.config import describe_validation_error, read_yaml_mapping
from serve_app.bench.errors import BenchError
from serve_app.capacity.lengths import Fixed, LogUniform
from serve_app.capacity.workload import SessionClass, Workload

WORKLOAD_FOLDER = Path(__file__).parents[2] / "configs" / "workloads"

# In code and not only in a file, so that the bench of an installed wheel runs without the repository.
DEFAULT_WORKLOAD = Workload(
    name="ladder",
    description="Prompts of very unequal length, unlike one another; answers of 64 tokens.",
    endpoint="completions",
    sessions=(
        SessionClass(
            name="question",
            prompt_tokens=LogUniform(kind="log_uniform", low=50, high=1500),
            output_tokens=Fixed(value=64),
        ),
    ),
)


def load_workload(name: str | None) -> Workload:
    """Read a workload: None is the default one, else a file's path or the name of one in ``configs/workloads``.

    Raises BenchError when there is none of that name, ConfigError when the file is wrong.
    """
    if name is None or name == DEFAULT_WORKLOAD.name:
        return DEFAULT_WORKLOAD
    path = Path(name)
    if not path.suffix:
        path = WORKLOAD_FOLDER / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted({DEFAULT_WORKLOAD.name, *(f.stem for f in WORKLOAD_FOLDER.glob("*.yaml"))}))
        raise BenchError(f"There is no workload {name!r}.", f"give a file, or one of: {known}")
    try:
        return Workload.model_validate(read_yaml_mapping(path))
    except ValidationError as error:
        raise describe_validation_error(error, Workload) from error
