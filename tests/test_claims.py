"""Tests of the ledger: its rule language, its registry, its boxes and its audit."""

import copy
import itertools
import json
import math
import re
import statistics
import textwrap
from html.parser import HTMLParser
from pathlib import Path

import nbclient
import nbformat
import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowgrad_utils import claims

RULES = Path(__file__).with_name("rules.txt")

REGISTRY = """
[[claim]]
id = "t.rate"
source = "Some Paper, Theorem 1"
statement = "|E| < |S| & more"
hypotheses = "alpha < 1"
kind = "rate"
chapter = "theorem"
status = "settled"
expected = "holds"
reason = "The bound is -0.25; 1e-12 is rounding; -0.1 is what a slow logarithm would leave."
controls = ["t.rate.control"]
[claim.rule]
measure = "slope of log |E| over log n"
predicted = "at most -1/4"
holds = ["high slope <= -0.25", "max error <= 1e-12"]
asymptotically = ["high slope < -0.1"]
correction = ["low slope >= -0.1", "all ordered == 1"]

[[claim]]
id = "t.rate.control"
source = "Some Paper, Theorem 1"
statement = "The same with W dependent on X"
hypotheses = "alpha < 1, W dependent on X"
kind = "rate"
chapter = "theorem"
status = "settled"
expected = "fails"
reason = "Even a slope of 0 is missed."
[claim.rule]
measure = "slope"
predicted = "no decay"
holds = ["low slope <= 0"]

[[claim]]
id = "t.large"
source = "Some Paper, Figure 2"
statement = "At full size"
hypotheses = "none"
kind = "empirical"
chapter = "figure"
status = "settled"
expected = "not reproducible here"
reason = "Needs a month."
[claim.rule]
measure = "nothing"
predicted = "a plot"
not_reproducible = "a month of computing"

[[claim]]
id = "t.later"
source = "Some Paper, Figure 3"
statement = "Later"
kind = "empirical"
chapter = "appendix"
status = "planned"
"""


def load(tmp_path, text):
    file = tmp_path / "claims.toml"
    file.write_text(text, encoding="utf-8")
    return claims.load_registry(file)


@pytest.fixture
def registry(tmp_path):
    return load(tmp_path, REGISTRY)


def measure(registry, slope=(-0.4, -0.5, -0.3), error=(1e-15,), ordered=True, **more):
    """Return the record of the theorem of the registry above, which holds unless told."""
    return claims.evaluate(
        "t.rate", registry=registry, slope=slope, error=list(error), ordered=[ordered], **more
    )


def book(registry):
    """Return the records of a whole book without a fault."""
    control = claims.evaluate("t.rate.control", registry=registry, slope=(0.2, 0.1, 0.3))
    large = claims.evaluate("t.large", registry=registry)
    return [record.to_dict() for record in (measure(registry), control, large)]


# --- the shipped registry -------------------------------------------------------------------------


def both_sides(condition):
    """Return the last number that meets the condition and the first that does not."""
    t = condition.number
    below, above = math.nextafter(t, -math.inf), math.nextafter(t, math.inf)
    return {
        "<=": (t, above),
        ">=": (t, below),
        "<": (below, t),
        ">": (above, t),
        "==": (t, above),
        "!=": (above, t),
    }[condition.comparator]


def undecisive(rule):
    """List the conditions that never decide: crossing their threshold leaves the verdict."""
    around = {}
    for _, c in rule.conditions:
        around.setdefault(c.measured_name, []).extend([*both_sides(c), c.number - 1, c.number + 1])
    found = []
    for tier, c in rule.conditions:
        inside, outside = both_sides(c)
        others = [name for name in around if name != c.measured_name]
        cases = (
            dict(zip(others, numbers))
            for numbers in itertools.product(*(around[name] for name in others))
        )
        decided = any(
            rule.verdict({**case, c.measured_name: inside}) == claims.TIERS[tier]
            and rule.verdict({**case, c.measured_name: outside}) != claims.TIERS[tier]
            for case in cases
        )
        if not decided:
            found.append(c.text)
    return found


def numbers_in(text):
    """Return the numbers that a text names, fractions included, without their signs."""
    words = re.findall(r"\d*\.?\d+(?:[eE][-+]?\d+)?", text)
    fractions = re.findall(r"(\d+)/(\d+)", text)
    return {float(word) for word in words} | {int(a) / int(b) for a, b in fractions if int(b)}


def test_numbers_are_found_in_prose():
    assert numbers_in("1e-12 or -.05, at nu = 1/4.") == {1e-12, 0.05, 0.25, 1, 4}


def unexplained(claim):
    """List the conditions whose number the row's reason does not mention."""
    explained = numbers_in(claim.reason)
    return [
        c.text
        for _, c in claim.rule.conditions
        # `all ... == 1` says "every one", which needs no number.
        if c.statistic != "all" and abs(c.number) not in explained
    ]


def settled_rows():
    return [claim for claim in claims.load_registry().values() if claim.rule]


def test_every_rule_is_listed_a_second_time():
    """A rule that changes in the registry must turn something red, whatever changed in it.

    The book's build notices a changed rule only if it changes a verdict: with a median in the
    place of a maximum it may not. Two things here notice the rest. Every row with its rule stands
    a second time in ``rules.txt``, as plain text, so that moving a goalpost takes two edits and
    shows up in a review as what it is; and every threshold must be named in the row's ``reason``
    (next test), so that the text which justifies a number cannot survive the number.
    """
    command = (
        'python -c "from lowgrad_utils import claims; '
        "print(*claims.rules_listing(), sep='\\n')\" > tests/rules.txt"
    )
    listed = RULES.read_text(encoding="utf-8").splitlines()
    assert claims.rules_listing() == listed, f"if the change is meant, write it down: {command}"


def test_every_threshold_is_explained_by_its_reason():
    assert {c.id: unexplained(c) for c in settled_rows() if unexplained(c)} == {}


def test_every_condition_of_every_rule_decides():
    """Just inside a threshold the tier's verdict, just outside another one, in some case."""
    assert {c.id: undecisive(c.rule) for c in settled_rows() if undecisive(c.rule)} == {}


def test_the_checks_of_rules_notice(registry):
    claim = registry["t.rate"]
    assert undecisive(claim.rule) == []
    assert unexplained(claim) == []
    idle = claims.Condition.parse("high slope <= 7")
    tiers = {**claim.rule.tiers, "holds": (*claim.rule.tiers["holds"], idle)}
    changed = claims.dataclasses.replace(claim.rule, tiers=tiers)
    assert undecisive(changed) == [idle.text]
    assert unexplained(claims.dataclasses.replace(claim, rule=changed)) == [idle.text]


def test_the_shipped_registry_is_cached_and_complete():
    registry = claims.load_registry()
    assert claims.load_registry() is registry
    assert {claim_id.split(".")[0] for claim_id in registry} == {"lrg", "tlh", "new"}
    assert all(claim.hypotheses for claim in registry.values())


# --- the registry's faults ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('kind = "rate"', 'kind = "rates"', "t.rate: kind is 'rates', but one of identity,"),
        ('status = "planned"', 'status = "plan"', "t.later: status is 'plan'"),
        ('chapter = "appendix"', "", "t.later: has no chapter"),
        ('chapter = "appendix"', "chapter = 3", "t.later: chapter is 3, but text is needed"),
        ('id = "t.later"', "", "row 4: has no id"),
        ('id = "t.later"', 'id = "t.large"', "t.large: registered twice"),
        ('status = "planned"', 'status = "planned"\ntone = 1', "t.later: unknown key 'tone'"),
        ('hypotheses = "alpha < 1"\n', "", "t.rate: has no hypotheses"),
        ('expected = "holds"', "", "t.rate: has no expected"),
        ('expected = "holds"', 'expected = "true"', "t.rate: expected is 'true'"),
        ('reason = "Needs a month."', "", "t.large: has no reason"),
        ('controls = ["t.rate.control"]', 'controls = "x"', "t.rate: controls is 'x'"),
        ('controls = ["t.rate.control"]', "", "t.rate: a settled rate needs at least one control"),
        ('controls = ["t.rate.control"]', "", "t.rate.control: no row 't.rate' lists it"),
        (
            'controls = ["t.rate.control"]',
            'controls = ["t.rate.control", "t.rate.control-2"]',
            "t.rate: control 't.rate.control-2' is not registered",
        ),
        (
            'controls = ["t.rate.control"]',
            'controls = ["t.rate.control", "t.large"]',
            "t.rate: control 't.large' is not named 't.rate.control...'",
        ),
        ('expected = "fails"', 'expected = "holds"', "t.rate.control: expected is 'holds'"),
        (
            'expected = "fails"',
            'expected = "fails"\ncontrols = ["x"]',
            "has no controls of its own",
        ),
        ('measure = "slope"', "", "t.rate.control: has no rule.measure"),
        ('predicted = "no decay"', "", 't.rate.control: has no rule.predicted ("" if'),
        ('measure = "slope"', 'measures = "slope"', "t.rate.control: unknown key 'rule.measures'"),
        ('holds = ["low slope <= 0"]', "", "t.rate.control: rule needs either conditions"),
        ('holds = ["low slope <= 0"]', "holds = []", "t.rate.control: rule.holds is []"),
        ("not_reproducible =", 'holds = ["max a <= 1"]\nnot_reproducible =', "needs either"),
        ("low slope <= 0", "lowest slope <= 0", "'lowest' is none of value, low, high"),
        ("low slope <= 0", "low slope =< 0", "'=<' is none of <= >="),
        ("low slope <= 0", "low slope <= zero", "'zero' is not a finite number"),
        ("low slope <= 0", "low slope <= nan", "'nan' is not a finite number"),
        ("low slope <= 0", "slope <= 0", "is not `<statistic> <quantity> <comparator> <number>`"),
        ("low slope <= 0", "low seeds <= 0", "'seeds' cannot be a keyword argument"),
        ("low slope <= 0", "low slope-1 <= 0", "'slope-1' cannot be a keyword argument"),
        ("[[claim]]", "[claim", "claims.toml is not TOML"),
        ("[[claim]]", "title = 1\n[[claim]]", "claims.toml: unknown key 'title'"),
    ],
)
def test_a_faulty_registry_is_refused_with_one_clear_line(tmp_path, old, new, message):
    assert old in REGISTRY
    with pytest.raises(claims.RegistryError) as caught:
        load(tmp_path, REGISTRY.replace(old, new, 1))
    assert sum(message in line for line in str(caught.value).splitlines()) == 1


def test_all_faults_are_told_at_once(tmp_path):
    text = REGISTRY.replace('kind = "empirical"', 'kind = "hearsay"')
    with pytest.raises(claims.RegistryError) as caught:
        load(tmp_path, text)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["t.large", "t.later"]


def test_a_settled_theorem_needs_its_control_settled(tmp_path):
    head, control = REGISTRY.split('id = "t.rate.control"')
    planned = control.replace('status = "settled"', 'status = "planned"', 1)
    with pytest.raises(claims.RegistryError, match=r"control 't\.rate\.control' is only planned"):
        load(tmp_path, head + 'id = "t.rate.control"' + planned)


# --- verdicts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "holds"),
        ({"slope": (-0.3, -0.4, -0.25)}, "holds"),
        ({"slope": (-0.3, -0.4, -0.2499)}, "holds asymptotically"),
        ({"error": [1e-15, 2e-12]}, "holds asymptotically"),
        ({"slope": (-0.3, -0.4, -0.1)}, "fails"),
        ({"slope": (0.0, -0.1, 0.1)}, "holds with a correction"),
        ({"slope": (0.0, -0.1, 0.1), "ordered": False}, "fails"),
        ({"slope": (0.0, -0.11, 0.1)}, "fails"),
    ],
)
def test_the_first_tier_that_is_met_gives_the_verdict(registry, changes, verdict):
    assert measure(registry, **changes).verdict == verdict


def test_what_cannot_be_measured_here_says_why(registry):
    record = claims.evaluate("t.large", registry=registry)
    assert (record.verdict, record.measured) == ("not reproducible here", "a month of computing")


def test_a_control_is_one(registry):
    record = claims.evaluate("t.rate.control", registry=registry, slope=(0.2, 0.1, 0.3))
    assert (record.control, record.verdict, record.expected) == (True, "fails", "fails")
    assert measure(registry).control is False


samples = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30)


@given(samples)
def test_statistics_are_what_their_names_say(values):
    def statistic(name, given=values):
        array = claims._sample("t", "x", given)
        return claims._statistic("t", name, "x", array)

    n, mean = len(values), math.fsum(values) / len(values)
    spread = statistics.stdev(values)
    low, high = scipy.stats.t.interval(0.95, n - 1, mean, max(spread, 1e-300) / math.sqrt(n))
    close = {"rel": 1e-9, "abs": 1e-9}
    assert statistic("min") == sorted(values)[0]
    assert statistic("max") == sorted(values)[-1]
    assert statistic("count") == n
    assert statistic("mean") == pytest.approx(mean, **close)
    assert statistic("median") == pytest.approx(statistics.median(values), **close)
    assert statistic("low") == pytest.approx(low, rel=1e-6, abs=1e-6)
    assert statistic("high") == pytest.approx(high, rel=1e-6, abs=1e-6)
    # Linear interpolation between order statistics, as statistics.quantiles does inclusively.
    twentieths = statistics.quantiles(values, n=20, method="inclusive")
    assert statistic("q05") == pytest.approx(twentieths[0], **close)
    assert statistic("q95") == pytest.approx(twentieths[-1], **close)
    assert statistic("value", values[0]) == values[0]
    assert statistic("all", [True] * n) == 1
    assert statistic("all", [True] * n + [False]) == 0
    assert statistic("mean", [True, True, True, False]) == 0.75


def test_the_interval_of_a_mean_by_hand():
    """Three numbers 1, 2, 3: mean 2, standard deviation 1, t quantile 4.303 at two degrees."""
    low, high = (claims._statistic("t", s, "x", np.array([1.0, 2.0, 3.0])) for s in ("low", "high"))
    assert (low, high) == (pytest.approx(-0.484, abs=1e-3), pytest.approx(4.484, abs=1e-3))


class Fit:
    """What a fitting function may return."""

    value, low, high = -0.4, -0.5, -0.3


@pytest.mark.parametrize("slope", [Fit(), claims.Estimate(-0.4, -0.5, -0.3), (-0.4, -0.5, -0.3)])
def test_an_estimate_comes_in_several_shapes(registry, slope):
    assert measure(registry, slope=slope).statistics["high slope"] == -0.3


def test_arrays_come_from_any_library(registry):
    values = [[1e-15, 3e-15], [2e-15, 0.0]]
    for error in (values, np.array(values), torch.tensor(values, dtype=float).requires_grad_()):
        record = claims.evaluate(
            "t.rate", registry=registry, slope=Fit(), error=error, ordered=np.array([True])
        )
        assert record.statistics["max error"] == 3e-15


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("slope", [math.nan, 1.0], "slope has 1 NaN or infinite"),
        ("slope", (0.0, -math.inf, 0.0), "slope has 1 NaN or infinite"),
        ("extra", torch.tensor([math.inf]), "extra has 1 NaN or infinite"),
        ("slope", -0.4, "'high slope' needs an estimate or at least two numbers"),
        ("slope", (3.0, 1.0, 2.0), "pass three measurements as a list"),
        ("error", (1.0, 0.0, 2.0), "'max error' needs an array of measurements, but error is an e"),
        ("error", [], r"error is \[\], but a number, an array of numbers"),
        ("error", "small", "error is 'small', but"),
        ("error", [[1.0], [1.0, 2.0]], "error is"),
        ("ordered", [1, 1], "'all ordered' needs booleans, but ordered is numbers"),
    ],
)
def test_a_measurement_that_does_not_fit_is_refused(registry, name, value, message):
    quantities = {"slope": Fit(), "error": [0.0], "ordered": [True], name: value}
    with pytest.raises(claims.ClaimError, match=message):
        claims.evaluate("t.rate", registry=registry, **quantities)


def test_a_value_is_one_number(tmp_path):
    registry = load(tmp_path, REGISTRY.replace("low slope <= 0", "value slope <= 0"))
    with pytest.raises(claims.ClaimError, match="'value slope' needs one number or an estimate"):
        claims.evaluate("t.rate.control", registry=registry, slope=[1.0, 2.0])


def test_a_forgotten_measurement_is_named(registry):
    # The first condition fails, so a careless check would not look at the second.
    with pytest.raises(claims.ClaimError, match=r"t\.rate: the rule needs error, ordered; pass"):
        claims.evaluate("t.rate", registry=registry, slope=(9.0, 8.0, 10.0))


def test_unknown_and_planned_rows_cannot_be_settled(registry):
    with pytest.raises(claims.ClaimError, match=r"'t\.none' is not in claims\.toml"):
        claims.evaluate("t.none", registry=registry)
    with pytest.raises(claims.ClaimError, match=r"t\.later: the row is planned"):
        claims.evaluate("t.later", registry=registry)


def test_seeds_are_the_seeds_themselves(registry):
    assert measure(registry, seeds=range(3)).seeds == [0, 1, 2]
    for wrong in (10, "none"):
        with pytest.raises(
            claims.ClaimError, match=f"seeds is {wrong!r}, but the seeds themselves"
        ):
            measure(registry, seeds=wrong)


# --- records and boxes ----------------------------------------------------------------------------

KEYS = {
    *("id", "source", "statement", "kind", "chapter", "status", "control", "predicted"),
    *("measured", "verdict", "expected", "sizes", "seeds", "conditions"),
}


def test_a_record_survives_json(registry):
    sizes = {"d": np.array([250, 500]), "n": range(2), "alpha": np.float64(0.5), "law": "Gauss"}
    record = measure(registry, sizes=sizes, seeds=np.arange(2), extra=[1, 2, 3]).to_dict()
    assert set(record) >= KEYS
    assert json.loads(json.dumps(record)) == record
    assert record["sizes"] == {"d": [250, 500], "n": [0, 1], "alpha": 0.5, "law": "Gauss"}
    assert record["also"] == {"min extra": 1, "median extra": 2, "max extra": 3}
    assert "high slope = -0.3; max error = 1e-15" in record["measured"]


def test_a_row_has_the_keys_of_a_record(registry):
    row = registry["t.later"].to_dict()
    assert set(row) == set(measure(registry).to_dict())
    assert (row["status"], row["measured"], row["verdict"]) == ("planned", None, None)
    assert json.loads(json.dumps(row)) == row


class Box(HTMLParser):
    """Reads a box: its outermost element, its text, and whether elements are balanced."""

    def __init__(self, text):
        super().__init__()
        self.open, self.outer, self.text = [], None, ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.outer = self.outer or (tag, dict(attrs))
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data + "\n"


@pytest.mark.parametrize(("predicted", "shown"), [("", False), ("0", True)])
def test_a_row_that_predicts_nothing_shows_no_prediction(tmp_path, predicted, shown):
    registry = load(tmp_path, REGISTRY.replace("at most -1/4", predicted))
    record = measure(registry)
    assert record.predicted == predicted
    for text in (repr(record), record._repr_mimebundle_()[0]["text/html"]):
        assert ("Predicted" in text) is shown
    assert registry["t.rate"].rule.predicted == predicted


def test_the_box_says_everything(registry):
    record = measure(registry, error=[1.23456e-11], sizes={"d": [250, 500]}, seeds=range(10))
    data, metadata = record._repr_mimebundle_()
    assert metadata == {"lowgrad_claim": record.to_dict()}
    box = Box(data["text/html"])
    assert box.outer[0] == "div"
    assert (box.outer[1]["class"], box.outer[1]["id"]) == ("lg-claim", "claim-t.rate")
    for text in (box.text, data["text/plain"], repr(record)):
        for part in (
            "|E| < |S| & more",
            "Some Paper, Theorem 1",
            "at most -1/4",
            "slope of log |E| over log n",
            "✓ met: high slope <= -0.25, measured -0.3",
            "✗ not met: max error <= 1e-12, measured 1.235e-11",
            "d = 250, 500",
            "0 to 9 (10 seeds)",
            "✗ holds asymptotically, but the book says: holds",
            "The bound is -0.25",
        ):
            assert part in text
    # A page shows letters, a terminal what the ledger says.
    assert "α < 1" in box.text
    assert "alpha < 1" in data["text/plain"]
    assert "holds, as the book says" in repr(measure(registry))
    assert "Negative control t.rate.control" in repr(
        claims.evaluate("t.rate.control", registry=registry, slope=Fit())
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("lambda_1(G_{1+2}) = |delta_{c,c}|^2", "λ₁(G₁₊₂) = |δ_{c,c}|²"),
        ("G0, G1+2 of u_12, S12 + S2, he_2 in C1", "G₀, G₁₊₂ of u₁₂, S₁₂ + S₂, he₂ in C1"),
        ("rank_2, q05_2, VGG11, x_2_high, G12x, S4", "rank_2, q05_2, VGG11, x_2_high, G12x, S4"),
        ("sigma' and mu_j, 2 nu", "σ' and μ_j, 2 ν"),
        ("x^2 >= sqrt(2m), q^T z, n^2.5, n^(1/2), A^Tx", "x² ≥ √(2m), qᵀ z, n^2.5, n^(1/2), A^Tx"),
        ("beta_error, alphabet, min_nu, network", "beta_error, alphabet, min_nu, network"),
    ],
)
def test_letters_are_shown_as_letters(text, shown):
    assert claims.readable(text) == shown


def test_text_from_a_registry_cannot_become_markup(tmp_path):
    hostile = "<script>alert(1)</script>"
    text = REGISTRY.replace("|E| < |S| & more", hostile).replace("at most -1/4", hostile)
    page = measure(load(tmp_path, text), sizes=hostile)._repr_mimebundle_()[0]["text/html"]
    assert "<script" not in page
    assert Box(page).text.count(hostile) == 3


def test_an_unexpected_verdict_is_shown_and_then_stops(registry, monkeypatch):
    shown = []
    monkeypatch.setattr(claims, "display", shown.append)
    good = {"registry": registry, "slope": Fit(), "error": [0.0], "ordered": [True]}
    assert claims.settle("t.rate", **good) is None
    with pytest.raises(claims.UnexpectedVerdict, match="measured 'fails', expected 'holds'"):
        claims.settle("t.rate", **{**good, "slope": (1.0, -1.0, 2.0)})
    assert [record.verdict for record in shown] == ["holds", "fails"]


def test_a_notebook_keeps_the_record_and_stops(tmp_path):
    """In a real kernel: the record lies in the output's metadata, and the next cell never runs."""
    (tmp_path / "claims.toml").write_text(REGISTRY, encoding="utf-8")
    source = """
        from lowgrad_utils import claims
        claims.settle("t.rate.control", registry=claims.load_registry("claims.toml"), slope=SLOPE)
    """
    cells = [textwrap.dedent(source).replace("SLOPE", s) for s in ("[1, 1.1]", "[-1, -1.1]")]
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in [*cells, "print('never')"]]
    )
    client = nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}})
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="UnexpectedVerdict"):
        client.execute()
    good, bad, never = (cell.outputs for cell in notebook.cells)
    assert [output.output_type for output in good] == ["display_data"]
    assert good[0].metadata["lowgrad_claim"]["verdict"] == "fails"
    assert set(good[0].data) == {"text/html", "text/plain"}
    assert [output.output_type for output in bad] == ["display_data", "error"]
    assert bad[0].metadata["lowgrad_claim"]["verdict"] == "holds"
    assert never == []


# --- the audit ------------------------------------------------------------------------------------


def test_a_whole_book_has_no_problems(registry):
    assert claims.audit(book(registry), ["theorem", "figure"], registry) == []


def test_the_audit_finds_what_is_missing(registry):
    problems = claims.audit([], ["theorem", "figure", "appendix"], registry)
    assert [p.split(":")[0] for p in problems] == ["t.rate", "t.rate.control", "t.large", "t.later"]
    assert all("never measured" in problem for problem in problems[:3])
    assert "planned, but its chapter 'appendix' exists" in problems[3]
    assert not any("_toc.yml" in problem for problem in problems)


def test_the_audit_names_a_chapter_that_the_contents_lack(registry):
    problems = claims.audit([], ["figure"], registry)
    lacking = {
        p.split(":")[0] for p in problems if p.endswith("and _toc.yml must name that chapter")
    }
    assert lacking == {"t.rate", "t.rate.control"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": "t.none"}, "t.none: measured, but not in claims.toml"),
        ({"measured_in": "figure"}, "measured in 'figure', but its chapter is 'theorem'"),
        ({"chapter": "figure"}, "measured in 'figure', but its chapter is 'theorem'"),
        ({"verdict": "fails"}, "says 'fails', but its numbers give 'holds'"),
        ({"statistics": {}}, "the record lacks 'high slope', which the rule needs"),
        ({"statistics": None}, "t.rate: the record lacks"),
    ],
)
def test_the_audit_finds_a_faulty_record(registry, change, message):
    records = book(registry)
    records[0].update(change)
    problems = claims.audit(records, ["theorem", "figure"], registry)
    assert sum(message in problem for problem in problems) == 1


def test_the_audit_believes_numbers_not_words(registry):
    records = book(registry)
    records[0]["statistics"]["high slope"] = 0.5
    problems = claims.audit(records, [], registry)
    assert problems == [
        "t.rate: the record says 'holds', but its numbers give 'fails'",
        "t.rate: measured 'fails', expected 'holds'",
    ]


def test_the_audit_finds_a_row_measured_twice(registry):
    records = book(registry)
    records.append({**copy.deepcopy(records[0]), "measured_in": "theorem"})
    problems = claims.audit(records, [], registry)
    assert problems == ["t.rate: measured 2 times (theorem, theorem); settle it once"]


def test_the_audit_finds_a_planned_row_measured(registry):
    records = [*book(registry), registry["t.later"].to_dict()]
    problems = claims.audit(records, [], registry)
    assert problems == ["t.later: measured, but the row is planned and has no rule"]


def test_a_rule_changed_after_measuring_is_noticed(registry, tmp_path):
    records = book(registry)
    stricter = load(tmp_path, REGISTRY.replace("high slope <= -0.25", "high slope <= -0.35"))
    problems = claims.audit(records, [], stricter)
    assert problems[0] == (
        "t.rate: the record says 'holds', but its numbers give 'holds asymptotically'"
    )
