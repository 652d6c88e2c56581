"""Patterns: gitignore rules checked against git itself, Ray's fnmatch lists checked against Ray."""

import os
import pickle
import subprocess
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ray_artifact_sync.errors import ConfigurationError
from ray_artifact_sync.patterns import FnmatchExclude, PatternSet, Selection

NAMES = st.sampled_from(["a", "b", "ab", "logs", "x.txt", "y.txt", "a b", "[1]", "A"])
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
SEGMENTS = st.sampled_from(["a", "b", "ab", "logs", "x.txt", "*.txt", "*", "?", "a*", "[ab]", "l*s", r"\[1\]", "A"])


@st.composite
def pattern_texts(draw, negations=True):
    segments = draw(st.lists(SEGMENTS, min_size=1, max_size=3))
    if draw(st.booleans()) and len(segments) < 3:
        segments.insert(draw(st.integers(0, len(segments))), "**")
    text = "/".join(segments)
    text = draw(st.sampled_from(["", "/"])) + text + draw(st.sampled_from(["", "/"]))
    return ("!" if negations and draw(st.integers(0, 3)) == 0 else "") + text


PATTERNS = st.lists(pattern_texts(), min_size=1, max_size=5)
POSITIVE = st.lists(pattern_texts(negations=False), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def git(tmp_path_factory):
    """`git(patterns, path)` -> (line number of the deciding pattern or 0, whether it ignores)."""
    root = tmp_path_factory.mktemp("repo")
    env = {"PATH": os.environ["PATH"], "HOME": str(root), "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(["git", "init", "-q", str(root)], check=True, env=env)

    def check(patterns, paths):
        (root / ".gitignore").write_text("\n".join(patterns) + "\n")
        done = subprocess.run(
            ["git", "check-ignore", "--no-index", "-v", "-n", "-z", "--stdin"],
            cwd=root,
            input="\0".join(paths) + "\0",
            capture_output=True,
            text=True,
            env=env,
            check=False,
        )
        assert done.returncode in (0, 1), done.stderr
        fields = done.stdout.split("\0")[:-1]
        result = {}
        for _, line, pattern, path in zip(*[iter(fields)] * 4):
            result[path] = (int(line or 0), bool(line) and not pattern.startswith("!"))
        return result

    return check


TABLE = [
    # patterns, path, selected
    (["*.tmp"], "a.tmp", True),
    (["*.tmp"], "deep/down/a.tmp", True),
    (["*.tmp"], "a.tmp.txt", False),
    (["/progress.csv"], "progress.csv", True),
    (["/progress.csv"], "sub/progress.csv", False),
    (["logs/"], "logs/a/b.txt", True),
    (["logs/"], "sub/logs/b.txt", True),
    (["logs/"], "logs", False),
    (["/logs/"], "sub/logs/b.txt", False),
    (["a/*.txt"], "a/x.txt", True),
    (["a/*.txt"], "b/a/x.txt", False),
    (["a/*.txt"], "a/b/x.txt", False),
    (["a/**"], "a/b/x.txt", True),
    (["a/**/"], "a/x.txt", False),
    (["a/**/"], "a/b/x.txt", True),
    (["**/x.json"], "x.json", True),
    (["**/x.json"], "a/b/x.json", True),
    (["a/**/x"], "a/x", True),
    (["a/**/x"], "a/b/c/x", True),
    (["*", "!*.png"], "x.png", False),
    (["*.txt", "!logs/"], "logs/x.txt", True),
    (["!logs/keep.txt", "logs/"], "logs/keep.txt", True),
    (["a/**", "!a/b/"], "a/b/x", True),
    (["logs", "!logs/keep"], "x/logs", True),
    (["*.txt", "!x.txt", "x.*"], "x.txt", True),
    ([r"\#x"], "#x", True),
    ([r"\!x"], "!x", True),
    (["a b"], "a b", True),
    ([r"t_(1, 2)_\[32, 32\]"], "t_(1, 2)_[32, 32]", True),
    (["[ab].txt"], "a.txt", True),
    (["[!ab].txt"], "a.txt", False),
    (["ABC"], "abc", False),
    (["*/"], "top.txt", False),
    (["*/"], "d/x.txt", True),
    (["**"], "d/x.txt", True),
    (["ünï*"], "ünïcode", True),
]


@pytest.mark.parametrize(("patterns", "path", "selected"), TABLE)
def test_table_agrees_with_git(git, patterns, path, selected):
    assert (PatternSet.of(*patterns).matches(path) is not None) is selected
    assert git(patterns, [path])[path][1] is selected


def test_a_negation_works_below_a_matched_directory_unlike_git(git):
    patterns = ["logs/", "!logs/keep.txt", "!logs/sub/"]
    keep = PatternSet.of(*patterns)
    assert git(patterns, ["logs/keep.txt"])["logs/keep.txt"] == (1, True)
    assert keep.matches("logs/keep.txt") is None
    assert keep.matches("logs/sub/deep/x") is None
    assert keep.matches("logs/other.txt") == "logs/"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(patterns=POSITIVE, paths=st.lists(PATHS, min_size=1, max_size=12, unique=True))
def test_without_negation_the_outcome_is_gits(git, patterns, paths):
    ours = PatternSet.of(*patterns)
    theirs = git(patterns, paths)
    for path in paths:
        assert (ours.matches(path) is not None) is theirs[path][1], (patterns, path)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(patterns=PATTERNS, paths=st.lists(PATHS, min_size=1, max_size=12, unique=True))
def test_with_negations_we_differ_from_git_only_below_a_matched_directory(git, patterns, paths):
    ours = PatternSet.of(*patterns)
    theirs = git(patterns, paths)
    for path in paths:
        selected, (line, ignored) = ours.matches(path) is not None, theirs[path]
        if selected == ignored:
            continue
        assert ignored, (patterns, path)
        assert any(p.startswith("!") for p in patterns[line:]), "released by nothing listed later"
        parent = path.rpartition("/")[0]
        assert PatternSet.of(patterns[line - 1]).matches(parent, is_dir=True), "not below a match"


@given(patterns=PATTERNS, directory=PATHS, below=PATHS)
def test_a_pruned_directory_has_nothing_unselected(patterns, directory, below):
    ours = PatternSet.of(*patterns)
    if ours.matches_dir(directory) is not None:
        assert ours.matches_dir(f"{directory}/{below}") is not None
        assert ours.matches(f"{directory}/{below}") is not None
        assert ours.matches(directory, is_dir=True) is not None


def test_pruning_heeds_only_negations_that_can_apply():
    ours = PatternSet.of("data/", "!/data/keep/")
    assert ours.matches_dir("other/data") == "data/"
    assert ours.matches_dir("data") is None
    assert ours.matches_dir("data/throw") == "data/"
    assert ours.matches_dir("data/keep") is None
    assert PatternSet.of("data/", "!*.txt").matches_dir("data") is None
    assert PatternSet.of("!*.txt", "data/").matches_dir("data") == "data/"


def test_order_of_questions_does_not_matter():
    patterns = ("logs/", "!logs/a/", "logs/a/b/")
    paths = ["logs/a/b/c", "logs/a/c", "logs/c", "logs/a/b/d"]
    expected = ["logs/a/b/", None, "logs/", "logs/a/b/"]
    forwards, backwards = PatternSet.of(*patterns), PatternSet.of(*patterns)
    assert [forwards.matches(path) for path in paths] == expected
    assert [backwards.matches(path) for path in reversed(paths)] == expected[::-1]


@given(first=PATTERNS, second=PATTERNS, path=PATHS, is_dir=st.booleans())
def test_union_selects_what_either_selects(first, second, path, is_dir):
    a, b = PatternSet.of(*first), PatternSet.of(*second)
    either = a.matches(path, is_dir) is not None or b.matches(path, is_dir) is not None
    assert ((a | b).matches(path, is_dir) is not None) is either
    assert ((b | a).matches(path, is_dir) is not None) is either
    either_dir = a.matches_dir(path) is not None or b.matches_dir(path) is not None
    assert ((a | b).matches_dir(path) is not None) >= either_dir
    assert a | PatternSet() == PatternSet() | a
    assert (a | b) | b == a | b


@given(patterns=PATTERNS, path=PATHS)
def test_pickling_keeps_the_value_and_drops_what_is_compiled(patterns, path):
    ours = PatternSet.of(*patterns)
    answer = ours.matches(path)
    state = pickle.dumps(ours)
    assert b"pathspec" not in state
    assert b"_rules" not in state
    back = pickle.loads(state)
    assert back == ours
    assert hash(back) == hash(ours)
    assert back.matches(path) == answer
    assert eval(repr(ours)) == ours


def test_union_needs_a_pattern_set():
    with pytest.raises(TypeError):
        PatternSet.of("a") | "b"
    assert not PatternSet()
    assert PatternSet.of("a")
    assert PatternSet.of("b", "a").patterns == ("b", "a")
    assert repr(PatternSet()) == "PatternSet.of()"


def test_a_path_deeper_than_the_stack():
    path = "/".join(["d"] * 2000)
    assert PatternSet.of("*.txt", "!d/x.txt").matches(f"{path}/x.txt") == "*.txt"


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("", "matches nothing"),
        ("  ", "matches nothing"),
        ("!", "matches nothing"),
        ("/", "matches nothing"),
        ("# comment", "comment"),
        ("a\nb", "line break"),
        ("./logs", "segment '.'"),
        ("../x", "segment '..'"),
        ("a//b", "segment ''"),
        ("//a", "segment ''"),
        (" a", "starts with a space"),
        ("a\\", "scape character"),
        ("[z-a]", "bad character range"),
        ("[[:alpha:]]", "not supported"),
        (3, "not int"),
        (None, "not NoneType"),
        (b"x", "not bytes"),
    ],
)
def test_an_invalid_pattern_is_named_with_the_reason(pattern, why):
    with pytest.raises(ConfigurationError, match="Invalid pattern") as caught:
        PatternSet.of("good", pattern)
    assert repr(pattern) in str(caught.value)
    assert why in str(caught.value)
    assert caught.value.pattern == pattern


# --- Ray's exclude lists ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "exclude",
    [
        ["*/checkpoint_*"],
        ["checkpoint_*"],
        ["foo"],
        ["foo/"],
        ["foo/*"],
        ["*.txt"],
        ["FOO*"],
        ["*f*", "c.*"],
        ["[cf]*"],
        [],
    ],
)
def test_fnmatch_lists_leave_out_the_files_that_ray_leaves_out(tmp_path, exclude):
    from pyarrow.fs import LocalFileSystem
    from ray.train._internal.storage import _upload_to_fs_path

    files = [
        "a/checkpoint_1/x.txt",
        "a/checkpoint_1/d/y.txt",
        "checkpoint_2/z.txt",
        "foo/f.txt",
        "foo/sub/g.bin",
        "bar/foo/h.bin",
        "foo.txt",
        "c.txt",
    ]
    for file in files:
        (tmp_path / "src" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / file).write_text("x")
    target = tmp_path / "dst"
    _upload_to_fs_path(str(tmp_path / "src"), LocalFileSystem(), str(target), exclude)
    uploaded = {str(p.relative_to(target)) for p in target.rglob("*") if p.is_file()}
    ours = FnmatchExclude.of(*exclude)
    assert uploaded == {file for file in files if ours.matches(file) is None}
    assert pickle.loads(pickle.dumps(ours)) == ours
    for file in files:
        directory = os.path.dirname(file)
        if directory and ours.matches_dir(directory) is not None:
            assert file not in uploaded


FNMATCHES = st.lists(st.text(st.sampled_from("ab/*?[]!."), min_size=1, max_size=6), min_size=1, max_size=4)


@given(patterns=FNMATCHES, path=PATHS, below=PATHS, is_dir=st.booleans())
def test_fnmatch_lists_match_as_fnmatch_does(patterns, path, below, is_dir):
    import fnmatch

    ours = FnmatchExclude.of(*patterns)
    candidates = [path, path + "/"] if is_dir else [path]
    expected = any(fnmatch.fnmatch(c, p) for c in candidates for p in patterns)
    assert (ours.matches(path, is_dir) is not None) is expected
    if ours.matches_dir(path) is not None:
        assert ours.matches(f"{path}/{below}") is not None


def test_fnmatch_list_of_something_else():
    with pytest.raises(ConfigurationError, match="not int"):
        FnmatchExclude.of(1)
    assert not FnmatchExclude()
    assert FnmatchExclude.of("a*", "b*").matches("bc") == "b*"


# --- include and exclude ----------------------------------------------------------------------


@given(include=st.just([]) | PATTERNS, exclude=st.just([]) | PATTERNS, path=PATHS)
def test_exclude_wins_and_no_include_means_everything(include, exclude, path):
    selection = Selection.of(include=include, exclude=exclude)
    included = not include or PatternSet.of(*include).matches(path) is not None
    excluded = PatternSet.of(*exclude).matches(path) is not None
    assert (selection.reason_to_skip(path) is None) is (included and not excluded)
    assert pickle.loads(pickle.dumps(selection)) == selection
    if selection.reason_to_prune(path) is not None:
        assert selection.reason_to_skip(f"{path}/below") is not None


def test_reasons_name_the_pattern():
    selection = Selection.of(include="plots/", exclude=["*.tmp", "__pycache__/"])
    assert selection.reason_to_skip("plots/a.png") is None
    assert selection.reason_to_skip("plots/a.tmp") == "excluded by the pattern '*.tmp'"
    assert selection.reason_to_skip("a.png") == "not matched by any include pattern"
    assert selection.reason_to_prune("x/__pycache__") == "excluded by the pattern '__pycache__/'"
    assert selection.reason_to_prune("plots") is None
    ray = Selection(exclude=FnmatchExclude.of("*/checkpoint_*"))
    assert ray.reason_to_skip("a/checkpoint_1/x") == "excluded by the pattern '*/checkpoint_*'"
    assert Selection().reason_to_skip("anything") is None


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_selection_names_the_option(option):
    with pytest.raises(ConfigurationError, match=f"^{option}: Invalid pattern '# x'"):
        Selection.of(**{option: ["# x"]})
    with pytest.raises(ConfigurationError, match=f"^{option} must be"):
        Selection.of(**{option: 3})


def test_100_000_paths_take_a_fraction_of_a_second():
    selection = Selection.of(include=["*.bin"], exclude=["*.tmp", "data/", "!data/keep/"])
    paths = [f"run{i // 1000}/part{i % 10}/file_{i}.bin" for i in range(100_000)]
    start = time.process_time()
    assert all(selection.reason_to_skip(path) is None for path in paths)
    assert time.process_time() - start < 2  # 0.2 s on an idle machine
