"""`with_artifacts`: function trainables whose artifacts are saved, flushed and restored with them."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ray_artifact_sync.errors import ConfigurationError
from ray_artifact_sync.trainable import ArtifactSyncMixin

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

THREAD_TIMEOUT_SECONDS = 30.0
"""How long the end of a trial waits for the user's function, so that what its `finally:` writes is not lost."""


class FunctionArtifactsMixin(ArtifactSyncMixin):
    """Ray puts this before its `FunctionTrainable` for functions made by `with_artifacts`.

    The user's function runs in a thread of its own. It is started by the first `train()`, after `restore()`, so its
    artifacts are as of the checkpoint before its first line runs. `reset` and `stop` signal the thread, wait for it
    (bounded), and only then flush: a `finally:` write neither vanishes nor lands in the next trial of a reused actor.
    """

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        """Lets the old trial's function end before its artifacts are flushed and the actor turns to the new trial."""
        self._join_function()
        return super().reset(*args, **kwargs)

    def stop(self) -> None:
        """Lets the function end, then flushes."""
        self._join_function()
        super().stop()

    def _join_function(self) -> None:
        from ray.train._internal.session import get_session  # noqa: PLC0415  (moves between releases)

        session = get_session()
        thread = getattr(session, "training_thread", None)
        if session is None or thread is None or not thread.is_alive():
            return
        # What Ray's session.finish() does, without its timeout of 0 s: `report` wakes up, sees the event and exits.
        session.stop_event.set()
        session.continue_lock.release()
        timeout = float(os.environ.get("TUNE_FUNCTION_THREAD_TIMEOUT_S", THREAD_TIMEOUT_SECONDS))
        # RunnerThread's own join raises what the function raised; that is for Ray to report.
        threading.Thread.join(thread, timeout)
        if thread.is_alive():
            logger.warning(
                "The training function of %s still runs %g s after it was told to end (it sees that at its next "
                "`tune.report`); what it writes from now on may not be saved. TUNE_FUNCTION_THREAD_TIMEOUT_S sets this "
                "time.",
                getattr(self, "trial_name", "a trial"),
                timeout,
            )


def with_artifacts(function: Function) -> Function:
    """Makes a function trainable's files survive with its checkpoints. A decorator, or a wrapper.

    Before the function runs, the working dir holds the artifacts as of the checkpoint that `tune.get_checkpoint()`
    returns (none, if it returns None). Each `tune.report` with a checkpoint saves them along. When the function
    returns, raises or is stopped, everything is flushed, files written in `finally:` included.

        @with_artifacts
        def train(config): ...

        tune.Tuner(tune.with_parameters(with_artifacts(train), data=data), run_config=configure(run_config))

    Composes with `tune.with_parameters` (put it inside) and `tune.with_resources` (either way round).

    Args:
        function: Takes `config` first, like any Tune function.

    Returns:
        A function for `tune.Tuner`.

    Raises:
        ConfigurationError: It is a class or no function.

    Example:
        ```python
        from ray import tune
        from ray_artifact_sync import configure, with_artifacts


        @with_artifacts
        def train(config):
            with open("log.txt", "a") as log:
                print("one step", file=log)
            tune.report({"loss": 1.0})


        tuner = tune.Tuner(train, run_config=configure(tune.RunConfig(name="exp")))
        ```
    """
    if inspect.isclass(function):
        raise ConfigurationError(
            f"with_artifacts() is for functions; write class {function.__name__}(ArtifactSyncMixin, tune.Trainable)."
        )
    if not callable(function):
        raise ConfigurationError(f"with_artifacts() takes a function, not {type(function).__name__}.")
    mixins = getattr(function, "__mixins__", ())
    if any(issubclass(mixin, FunctionArtifactsMixin) for mixin in mixins):
        return function

    def trainable(config: Any, *args: Any, **kwargs: Any) -> Any:
        return function(config, *args, **kwargs)

    functools.update_wrapper(trainable, function)
    # Ray reads the signature of what it is given; with_parameters passes its parameters by keyword.
    if inspect.isgeneratorfunction(function):
        trainable = _generator(function)
    trainable.__mixins__ = (FunctionArtifactsMixin, *mixins)  # type: ignore[attr-defined]
    return trainable  # type: ignore[return-value]


def _generator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Ray looks whether the function is a generator function."""

    def trainable(config: Any, *args: Any, **kwargs: Any) -> Any:
        yield from function(config, *args, **kwargs)

    return functools.update_wrapper(trainable, function)
