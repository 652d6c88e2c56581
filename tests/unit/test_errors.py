"""Errors cross actors: each survives pickling, and is the built-in that it promises to be."""

import copy
import inspect
import multiprocessing
import pickle

import pytest

from ray_artifact_sync import errors
from ray_artifact_sync.errors import ArtifactSyncError, IncompleteSyncError, StorageError

BUILT_INS = {
    "ArtifactSyncError": Exception,
    "InvalidPathError": ValueError,
    "ConfigurationError": ValueError,
    "ManifestError": ValueError,
    "UnknownFormatError": ValueError,
    "ArtifactConflictError": Exception,
    "IntegrityError": Exception,
    "FileChangedError": Exception,
    "PathTakenError": Exception,
    "SyncTimeoutError": TimeoutError,
    "StorageError": OSError,
    "ArtifactNotFoundError": FileNotFoundError,
    "StoragePermissionError": PermissionError,
    "PreconditionFailedError": OSError,
    "CannotAppendError": OSError,
    "ArtifactExistsError": FileExistsError,
    "StagingError": OSError,
    "WorkerDiedError": RuntimeError,
    "IncompleteSyncError": Exception,
}
CLASSES = [value for _, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == errors.__name__]


def test_the_table_is_complete():
    assert {cls.__name__ for cls in CLASSES} == BUILT_INS.keys()


@pytest.mark.parametrize("cls", CLASSES)
def test_one_base_and_the_built_in(cls):
    assert issubclass(cls, ArtifactSyncError)
    assert issubclass(cls, BUILT_INS[cls.__name__])


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("copied", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_fields_survive(cls, copied):
    error = cls("what: where; what to do", path="a/b", errno=13)
    again = copied(error)
    assert type(again) is cls
    assert str(again) == "what: where; what to do"
    assert (again.path, again.errno) == ("a/b", 13)


@pytest.mark.parametrize("cls", CLASSES)
def test_a_bare_error_has_a_text(cls):
    assert str(cls())
    assert type(pickle.loads(pickle.dumps(cls()))) is cls


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if issubclass(cls, StorageError)])
def test_retryable_survives(cls):
    assert cls("x").retryable is False
    assert pickle.loads(pickle.dumps(cls("x", retryable=True))).retryable is True


def test_an_os_error_text_is_only_the_message():
    # OSError would show "[Errno 13] ..." of two arguments.
    assert str(errors.ArtifactNotFoundError("gone", errno=2, path="x")) == "gone"


def test_the_failures_of_an_incomplete_sync_survive():
    error = IncompleteSyncError(
        "2 failed", failures={"a": StorageError("refused", retryable=True), "b": OSError(5, "x")}
    )
    again = pickle.loads(pickle.dumps(error))
    assert list(again.failures) == ["a", "b"]
    assert again.failures["a"].retryable is True
    assert again.failures["b"].errno == 5


class UnpicklableError(Exception):
    def __reduce__(self):
        raise TypeError("has a socket in it")


class OnlyHereError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize("cause", [UnpicklableError("the real cause"), OnlyHereError("the real", "cause")])
def test_a_cause_that_cannot_travel_keeps_its_text(cause):
    error = IncompleteSyncError("1 failed", failures={"a": cause})
    again = pickle.loads(pickle.dumps(error))
    assert "cause" in str(again.failures["a"])
    assert type(cause).__name__ in str(again.failures["a"])
    assert error.failures["a"] is cause, "here it stays what it is"


def _raise_in_child(connection):
    connection.send(IncompleteSyncError("x", failures={"p": errors.StoragePermissionError("no", path="p")}))
    connection.close()


def test_an_error_crosses_a_process():
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_raise_in_child, args=(theirs,))
    child.start()
    error = ours.recv()
    child.join(30)
    assert isinstance(error.failures["p"], PermissionError)


def test_survives_what_ray_makes_of_it():
    """Ray raises a class that it derives from ours at run time; Train V1 copies the instance."""
    import copy

    exceptions = pytest.importorskip("ray.exceptions")
    cause = errors.WorkerDiedError("rank 1 is gone", ranks=(1,))
    dual = exceptions.RayTaskError("f", "traceback", cause).as_instanceof_cause()
    assert isinstance(dual, errors.WorkerDiedError)
    copied = copy.copy(dual)
    assert type(copied) is type(dual)
    assert copied.cause is cause
    assert copied.ranks == (1,)
