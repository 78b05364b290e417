"""The engine process of these tests: everything is real but the model. Started like ``python -m engine.build``."""

from __future__ import annotations

import argparse
from typing import NoReturn

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.core.messages import OnProgress, Progress
from engine.core.process_main import run_engine_process
from tests.core_fakes import ChainRunner, make_core


def main() -> NoReturn:
    """Build a chain model whose steps take ``--step-s``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--step-s", type=float, default=0.002)
    parser.add_argument("--steps-in-flight", type=int, default=2)
    arguments = parser.parse_args()

    def build(config: EngineConfig, on_progress: OnProgress) -> EngineCore:
        on_progress(Progress("weights", 1.0))
        assert isinstance(config.slots, int)
        runner = ChainRunner(step_s=arguments.step_s, max_steps_in_flight=arguments.steps_in_flight)
        return make_core(runner, slots=config.slots, max_waiting_requests=config.max_waiting_requests)

    run_engine_process(arguments.fd, build)


if __name__ == "__main__":
    main()
