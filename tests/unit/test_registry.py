"""The registry: who owns which file in a trial dir."""

import pickle
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_artifact_sync import registry as registry_module
from ray_artifact_sync.errors import ConfigurationError
from ray_artifact_sync.registry import ArtifactRegistry, Owner


@pytest.fixture(autouse=True)
def _own_declarations(monkeypatch):
    monkeypatch.setattr(registry_module, "_declared", {})


def owner_name(registry, path):
    owner = registry.owner_of(path)
    return owner.name if owner else None


@pytest.mark.parametrize(
    ("path", "owner"),
    [
        ("error.txt", "Ray"),
        ("error.pkl", "Ray"),
        ("progress.csv", "CSVLoggerCallback"),
        ("result.json", "JsonLoggerCallback"),
        ("params.json", "JsonLoggerCallback"),
        ("params.pkl", "JsonLoggerCallback"),
        ("events.out.tfevents.1700000000.host", "TBXLoggerCallback"),
        ("wandb/run-1/files/output.log", "WandbLoggerCallback"),
        ("sub/progress.csv", None),
        ("sub/error.txt", None),
        ("tb/events.out.tfevents.1700000000.host", None),
        ("sub/wandb/x", None),
        ("wandb", None),  # a file of that name
        ("stdout", None),
        ("checkpoint_notes.txt", None),
        ("checkpoint_000001/model.pt", None),  # checkpoints are not the registry's business
        ("mlruns/0/meta.yaml", None),
        ("Progress.csv", None),
        ("progress.csv.bak", None),
    ],
)
def test_default_owners(path, owner):
    assert owner_name(ArtifactRegistry.default(), path) == owner


def test_directories():
    registry = ArtifactRegistry.default().with_owner("Logs", "logs/", "!logs/keep.txt")
    assert registry.owner_of_dir("wandb") == Owner("WandbLoggerCallback", "/wandb/")
    assert registry.owner_of_dir("wandb/run") == Owner("WandbLoggerCallback", "/wandb/")
    assert registry.owner_of("wandb", is_dir=True) == Owner("WandbLoggerCallback", "/wandb/")
    assert registry.owner_of_dir("logs") is None  # keep.txt is below
    assert registry.owner_of_dir("plots") is None


class Extra:
    artifact_patterns = ("extra.json", "logs/")


def test_declared_files_stay_out_and_lookalikes_go_up():
    registry = ArtifactRegistry.from_callbacks([Extra()])
    assert registry.owner_of("extra.json") == Owner("Extra", "/extra.json")
    assert registry.owner_of("logs/deep/down.txt") == Owner("Extra", "/logs/")
    for artifact in ("checkpoint_notes.txt", "sub/progress.csv", "sub/extra.json", "a/logs/x"):
        assert registry.owner_of(artifact) is None


def test_plain_patterns_mean_the_root_and_two_stars_any_depth():
    registry = ArtifactRegistry().with_owner("A", "*.png", "**/x.json", "a/b.txt", "/c", r"\#d")
    assert registry.patterns == {"A": ("/*.png", "**/x.json", "/a/b.txt", "/c", r"/\#d")}
    assert registry.owner_of("plot.png")
    assert registry.owner_of("#d")
    assert not registry.owner_of("sub/plot.png")
    assert registry.owner_of("x.json")
    assert registry.owner_of("sub/sub/x.json")


def test_a_negation_releases_within_its_owner_only():
    registry = (
        ArtifactRegistry()
        .with_owner("First", "logs/", "!logs/keep.txt")
        .with_owner("Second", "logs/keep.txt")
        .with_owner("Third", "!logs/")
    )
    assert owner_name(registry, "logs/x") == "First"
    assert owner_name(registry, "logs/keep.txt") == "Second"


def test_the_first_owner_in_order_is_named():
    registry = ArtifactRegistry().with_owner("B", "x").with_owner("A", "x", "y")
    assert list(registry) == ["B", "A"]
    assert len(registry) == 2
    assert owner_name(registry, "x") == "B"
    assert owner_name(registry, "y") == "A"


def test_with_owner_returns_a_new_value():
    default = ArtifactRegistry.default()
    more = default.with_owner("Mine", "a").with_owner("Mine", "b", "a")
    assert default == ArtifactRegistry.default()
    assert more != default
    assert set(more.patterns["Mine"]) == {"/a", "/b"}
    assert default.with_owner("Nobody") is default
    with pytest.raises(AttributeError):
        default.owners = ()
    with pytest.raises(TypeError):
        default.patterns["x"] = ()
    with pytest.raises(ConfigurationError, match="non-empty"):
        default.with_owner("", "x")
    with pytest.raises(ConfigurationError, match=r"^Mine: Invalid pattern '../x'"):
        default.with_owner("Mine", "../x")


def test_repeating_a_pattern_after_a_negation_counts():
    registry = ArtifactRegistry().with_owner("A", "logs/", "!logs/keep.txt", "logs/")
    assert registry.owner_of("logs/keep.txt")


def test_repr_is_readable():
    registry = ArtifactRegistry().with_owner("A", "x", "logs/").with_owner("B", "y")
    assert repr(registry) == "ArtifactRegistry(A: /x /logs/, B: /y)"


OWNERS = st.lists(
    st.tuples(
        st.sampled_from("ABC"),
        st.lists(
            st.sampled_from(["x", "*.png", "logs/", "!logs/x", "**/x", "a/b", "!x"]),
            min_size=1,
            max_size=4,
        ),
    ),
    max_size=4,
)
PATHS = st.lists(st.sampled_from(["x", "a", "b", "logs", "p.png"]), min_size=1, max_size=3)


@given(owners=OWNERS, path=PATHS.map("/".join))
def test_round_trip_through_pickle_and_agreement_with_each_owner_alone(owners, path):
    registry = ArtifactRegistry()
    for name, patterns in owners:
        registry = registry.with_owner(name, *patterns)
    answer = registry.owner_of(path)
    state = pickle.dumps(registry)
    assert b"_sets" not in state
    back = pickle.loads(state)
    assert back == registry
    assert hash(back) == hash(registry)
    assert back.owner_of(path) == answer
    alone = [
        owner
        for name, patterns in registry.patterns.items()
        if (owner := ArtifactRegistry().with_owner(name, *patterns).owner_of(path))
    ]
    assert answer == (alone[0] if alone else None)
    if registry.owner_of_dir(path):
        assert registry.owner_of(f"{path}/x")


# --- callbacks ----------------------------------------------------------------------


def test_no_callbacks_is_the_default():
    assert ArtifactRegistry.from_callbacks(None) == ArtifactRegistry.default()
    assert ArtifactRegistry.from_callbacks([]) == ArtifactRegistry.default()
    assert ArtifactRegistry.from_callbacks([object(), None]) == ArtifactRegistry.default()


def test_forms_of_declarations():
    class OneString:
        artifact_patterns = "one.txt"

    class OnInstance:
        def __init__(self, name):
            self.artifact_patterns = [name]

    class Computed:
        def __init__(self, out):
            self.out = out

        @property
        def artifact_patterns(self):
            yield f"{self.out}/"

    class Nothing:
        artifact_patterns = None

    class Inherits(OneString):
        artifact_patterns = ("two.txt",)

    registry = ArtifactRegistry.from_callbacks(
        [OneString, OnInstance("i1"), OnInstance("i2"), Computed("out"), Nothing(), Inherits()]
    )
    mine = {k: v for k, v in registry.patterns.items() if k not in ArtifactRegistry.default()}
    assert mine == {
        "OneString": ("/one.txt",),
        "OnInstance": ("/i1",),
        "OnInstance (2)": ("/i2",),
        "Computed": ("/out/",),
        "Inherits": ("/two.txt",),
    }


def test_two_callbacks_do_not_negate_each_other():
    class Keeps:
        def __init__(self, *patterns):
            self.artifact_patterns = patterns

    registry = ArtifactRegistry.from_callbacks(
        [Keeps("logs/keep.txt"), Keeps("logs/", "!logs/keep.txt"), Keeps("logs/", "!logs/keep.txt")]
    )
    assert owner_name(registry, "logs/keep.txt") == "Keeps"
    assert owner_name(registry, "logs/x") == "Keeps (2)"
    assert "Keeps (3)" not in registry


@pytest.mark.parametrize("error", [RuntimeError("no config"), AttributeError("cfg"), KeyError("k")])
def test_a_property_that_raises_names_the_callback(error):
    class Broken:
        @property
        def artifact_patterns(self):
            raise error

    with pytest.raises(ConfigurationError, match="artifact_patterns of the callback Broken") as got:
        ArtifactRegistry.from_callbacks([Broken()])
    assert got.value.__cause__ is error


@pytest.mark.parametrize("value", [3, [3], ["ok", b"x"], ["../up"], [""]])
def test_a_bad_declaration_names_the_callback(value):
    class Bad:
        artifact_patterns = value

    with pytest.raises(ConfigurationError, match="Bad"):
        ArtifactRegistry.from_callbacks([Bad()])


def test_a_property_on_a_class_needs_an_instance():
    class Computed:
        @property
        def artifact_patterns(self):
            return "x"

    with pytest.raises(ConfigurationError, match="Computed is a property"):
        ArtifactRegistry.from_callbacks([Computed])
    with pytest.raises(ConfigurationError, match="callbacks must be"):
        ArtifactRegistry.from_callbacks(Computed())


def test_a_wrapper_that_delegates_attributes_counts():
    class Wrapper:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

    registry = ArtifactRegistry.from_callbacks([Wrapper(Extra())])
    assert owner_name(registry, "extra.json") == "Wrapper"


def test_containers_are_unpacked_at_any_depth():
    class Group:
        def __init__(self, *callbacks):
            self._callbacks = list(callbacks)

    class Other:
        artifact_patterns = "other.txt"

    loop = Group(Other())
    loop._callbacks.append(loop)
    registry = ArtifactRegistry.from_callbacks([Group(Group(Extra())), loop])
    assert owner_name(registry, "extra.json") == "Extra"
    assert owner_name(registry, "other.txt") == "Other"


def test_templates_of_loggers():
    class Table:
        _SAVED_FILE_TEMPLATES = ["table-{}.csv", "events.*", "odd{.txt", "sub/{trial_id:>5}.txt"]

    registry = ArtifactRegistry.from_callbacks([Table()])
    assert registry.patterns["Table"] == (
        "/table-*.csv",
        "/events.*",
        "/odd{.txt",
        "/sub/*.txt",
    )
    assert registry.owner_of("table-7.csv")
    assert not registry.owner_of("sub/table-7.csv")


def test_rays_own_callbacks_add_nothing_to_the_default():
    from ray.tune.callback import Callback, CallbackList
    from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback, TBXLoggerCallback
    from ray.tune.logger.aim import AimLoggerCallback
    from ray.tune.logger.comet import CometLoggerCallback
    from ray.tune.logger.mlflow import MLflowLoggerCallback
    from ray.tune.logger.wandb import WandbLoggerCallback

    class MyCSV(CSVLoggerCallback):
        pass

    default = ArtifactRegistry.default()
    instances = [CSVLoggerCallback(), JsonLoggerCallback(), TBXLoggerCallback(), MyCSV()]
    assert ArtifactRegistry.from_callbacks(instances) == default
    assert ArtifactRegistry.from_callbacks(CallbackList(instances)) == default
    integrations = [
        AimLoggerCallback,
        CometLoggerCallback,
        MLflowLoggerCallback,
        WandbLoggerCallback,
        Callback,
    ]
    assert ArtifactRegistry.from_callbacks(integrations) == default

    class Predictions(Callback):
        artifact_patterns = ("predictions/", "summary.json")

    registry = ArtifactRegistry.from_callbacks([CallbackList([CSVLoggerCallback(), Predictions()])])
    assert registry.patterns["Predictions"] == ("/predictions/", "/summary.json")


def test_every_template_of_rays_loggers_is_in_the_default():
    from ray.tune.utils.callback import DEFAULT_CALLBACK_CLASSES

    for logger in DEFAULT_CALLBACK_CLASSES:
        for template in logger._SAVED_FILE_TEMPLATES:
            path = template.replace("*", "1700000000.host")
            assert owner_name(ArtifactRegistry.default(), path) == logger.__name__


# --- declare ----------------------------------------------------------------------


class TheirBase:
    pass


class Theirs(TheirBase):
    pass


class Sub(Theirs):
    artifact_patterns = "!theirs/keep"


def test_declare_covers_subclasses_by_class_and_by_name():
    ArtifactRegistry.declare(Theirs, "theirs/")
    ArtifactRegistry.declare(f"{__name__}.TheirBase", "base.txt")
    ArtifactRegistry.declare("not.imported.Class", "never.txt")
    registry = ArtifactRegistry.from_callbacks([TheirBase(), Theirs(), Sub()])
    assert registry.patterns["TheirBase"] == ("/base.txt",)
    assert registry.patterns["Theirs"] == ("/theirs/",)
    assert registry.patterns["Sub"] == ("/base.txt", "/theirs/", "!/theirs/keep")
    assert ArtifactRegistry.from_callbacks([Theirs]).owner_of("theirs/x")
    assert not registry.owner_of("never.txt")


def test_declaring_again_adds_and_is_idempotent():
    for _ in range(3):
        ArtifactRegistry.declare(Theirs, "a", "b")
    ArtifactRegistry.declare(Theirs, "c")
    assert ArtifactRegistry.from_callbacks([Theirs()]).patterns["Theirs"] == ("/a", "/b", "/c")


def test_declarations_that_cannot_work():
    with pytest.raises(ConfigurationError, match=r"package\.module\.Class"):
        ArtifactRegistry.declare("Plain", "x")
    with pytest.raises(ConfigurationError, match="class or a name"):
        ArtifactRegistry.declare(Theirs(), "x")
    with pytest.raises(ConfigurationError, match="No patterns"):
        ArtifactRegistry.declare(Theirs)
    with pytest.raises(ConfigurationError, match="Theirs: Invalid pattern"):
        ArtifactRegistry.declare(Theirs, "# x")


def test_declare_from_many_threads():
    threads = [threading.Thread(target=ArtifactRegistry.declare, args=(Theirs, f"f{i}")) for i in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ArtifactRegistry.from_callbacks([Theirs()]).patterns["Theirs"]) == 32


def test_100_000_paths_take_a_fraction_of_a_second():
    registry = ArtifactRegistry.from_callbacks([Extra()])
    paths = [f"run{i // 1000}/part{i % 10}/file_{i}.bin" for i in range(100_000)]
    start = time.process_time()
    assert all(registry.owner_of(path) is None for path in paths)
    assert time.process_time() - start < 1  # 0.03 s on an idle machine
