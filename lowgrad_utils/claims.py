"""The ledger: what each statement predicts, what was measured, and the verdict that follows.

``claims.toml`` lists every statement with the rule that decides it. A notebook hands over what it
measured and the ledger works out the verdict, so that no notebook can type one.

A rule is a list of conditions in tiers. A condition is four words,
``<statistic> <quantity> <comparator> <number>``, such as ``max relative_error <= 1e-12``:

========================  ========================================================================
statistic                 of the quantity that the notebook measured
========================  ========================================================================
value                     the number itself, or the central value of an estimate
low, high                 ends of an estimate's interval; of an array, ends of the 95 % Student-t
                          interval of its mean
min, max, median, mean    of an array (the mean of booleans is the share that is true)
q05, q95                  5 % and 95 % quantiles of an array
count                     the number of measurements in an array
all                       of booleans: 1 if every one is true, otherwise 0
========================  ========================================================================

The verdict is the first tier, in the order of `TIERS`, all of whose conditions are met.
"""

import dataclasses
import functools
import html
import math
import operator
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.special
from IPython.display import display

#: A rule's tiers in the order in which they are tried, with the verdict each one gives.
TIERS = {
    "holds": "holds",
    "asymptotically": "holds asymptotically",
    "correction": "holds with a correction",
}
#: Every verdict there is.
VERDICTS = (*TIERS.values(), "fails", "not reproducible here")
#: Every kind of statement; those in `THEOREMS` need a negative control.
KINDS = ("identity", "bound", "rate", "threshold", "empirical")
#: Kinds of statement that claim more than what one experiment shows.
THEOREMS = KINDS[:-1]

_GREEK = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "zeta": "ζ", "eta": "η", "theta": "θ",
    "lambda": "λ", "mu": "μ", "nu": "ν", "sigma": "σ", "tau": "τ", "psi": "ψ", "omega": "ω",
    "Sigma": "Σ", "Phi": "Φ", "Theta": "Θ", "Omega": "Ω",
}  # fmt: skip
_SPELLED = re.compile(rf"(?<![A-Za-z_])(?:{'|'.join(_GREEK)})(?![A-Za-z]|_[A-Za-z]\w)")
# G_{1+2}; lambda_1 and he_2, but not a measured rank_2; the papers' G0 to G3, S1, S12 and S2.
_SUBSCRIPT = re.compile(
    r"_\{(?P<braced>[0-9+]+)\}|(?:(?<=\b[A-Za-zα-ω])|(?<=\bhe))_(?P<digits>\d+)(?!\w)"
    r"|(?<=\b[GS])(?P<matrix>[0-3]|12|1\+2)(?![\w+])"
)
_LOWERED = str.maketrans("0123456789+", "₀₁₂₃₄₅₆₇₈₉₊")
_SIGNS = {"<=": "≤", ">=": "≥", "^2": "²", "^T": "ᵀ", "sqrt": "√"}
_SIGN = re.compile(r"<=|>=|\^2(?![\d.])|\^T(?!\w)|\bsqrt(?=[( ])")

_COMPARATORS = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "==": operator.eq,
    "!=": operator.ne,
}
# Names that `evaluate` takes for itself, so that no quantity can have them.
_RESERVED = ("registry", "sizes", "seeds")


class RegistryError(ValueError):
    """The registry contradicts itself: one line a problem, each with the row's id."""


class ClaimError(ValueError):
    """What was handed to the ledger does not fit the row's rule."""


class UnexpectedVerdict(Exception):
    """A measurement decided otherwise than the registry's row expects."""


class Estimate(NamedTuple):
    """A number with its interval, such as a fitted slope.

    Attributes:
        value: The central value.
        low: The lower end of the interval.
        high: The upper end of the interval.
    """

    value: float
    low: float
    high: float


class Condition(NamedTuple):
    """One comparison of a rule, ``<statistic> <quantity> <comparator> <number>``.

    Attributes:
        statistic: A word of the table in the module's description.
        quantity: The name under which a notebook supplies the measurement.
        comparator: One of ``<= >= < > == !=``.
        number: The threshold.
        text: The condition as written in the registry.
    """

    statistic: str
    quantity: str
    comparator: str
    number: float
    text: str

    @property
    def measured_name(self) -> str:
        """The statistic and the quantity, the key under which a record keeps the number."""
        return f"{self.statistic} {self.quantity}"

    def met(self, measured: float) -> bool:
        """Tell whether ``measured`` compares with the threshold as the condition asks."""
        return bool(_COMPARATORS[self.comparator](measured, self.number))

    @classmethod
    def parse(cls, text: str) -> "Condition":
        """Read a condition from its four words.

        Args:
            text: Such as ``"max relative_error <= 1e-12"``.

        Raises:
            ValueError: If it is not four words of the rule language; says which is wrong.

        Example:
            >>> Condition.parse("max relative_error <= 1e-12").met(3e-15)
            True
        """
        words = text.split() if isinstance(text, str) else []
        if len(words) != 4:
            raise ValueError(
                f"condition {text!r} is not `<statistic> <quantity> <comparator> <number>`"
            )
        statistic, quantity, comparator, number = words
        if statistic not in _STATISTICS:
            raise ValueError(
                f"condition {text!r}: {statistic!r} is none of {', '.join(_STATISTICS)}"
            )
        if not quantity.isidentifier() or quantity in _RESERVED:
            raise ValueError(f"condition {text!r}: {quantity!r} cannot be a keyword argument")
        if comparator not in _COMPARATORS:
            raise ValueError(
                f"condition {text!r}: {comparator!r} is none of {' '.join(_COMPARATORS)}"
            )
        try:
            threshold = float(number)
        except ValueError:
            threshold = math.nan
        if not math.isfinite(threshold):
            raise ValueError(f"condition {text!r}: {number!r} is not a finite number")
        return cls(statistic, quantity, comparator, threshold, text)


@dataclasses.dataclass(frozen=True)
class Rule:
    """What decides a statement, fixed before the measuring.

    Attributes:
        measure: What is measured, in words.
        predicted: What the statement predicts for it, in words; empty if it predicts no number.
        tiers: Conditions by tier, in the order of `TIERS`.
        not_reproducible: Why this book cannot measure it, or None.
    """

    measure: str
    predicted: str
    tiers: dict[str, tuple[Condition, ...]]
    not_reproducible: str | None = None

    @property
    def conditions(self) -> list[tuple[str, Condition]]:
        """Every condition with its tier."""
        return [(tier, c) for tier, conditions in self.tiers.items() for c in conditions]

    def verdict(self, statistics: Mapping[str, float]) -> str:
        """Decide: the first tier all of whose conditions are met, otherwise ``fails``.

        Args:
            statistics: The measured number of each condition, by its `Condition.measured_name`.

        Raises:
            KeyError: If a condition's number is missing.

        Example:
            >>> rule = Rule("", "", {"holds": (Condition.parse("max error <= 1e-12"),)})
            >>> rule.verdict({"max error": 1e-3})
            'fails'
        """
        if self.not_reproducible:
            return "not reproducible here"
        for tier, conditions in self.tiers.items():
            # A list, not a generator: a number that a later condition needs must not be missing
            # unnoticed because an earlier condition has already failed.
            if all([c.met(statistics[c.measured_name]) for c in conditions]):
                return TIERS[tier]
        return "fails"


@dataclasses.dataclass(frozen=True)
class Claim:
    """One row of the registry.

    Attributes:
        id: The row's name, such as ``lrg.prop-2.1``; ``<id>.control...`` names a negative control.
        source: The paper and the number of the statement in it.
        statement: What is claimed.
        hypotheses: Under which hypotheses.
        kind: One of `KINDS`.
        chapter: The stem of the notebook that measures it.
        status: ``planned`` or ``settled``.
        rule: What decides, or None while the row is planned.
        expected: The verdict the book stands by, or None while the row is planned.
        reason: Where the rule's numbers come from, or None while the row is planned.
        controls: Ids of its negative controls.
    """

    id: str
    source: str
    statement: str
    kind: str
    chapter: str
    status: str
    hypotheses: str = ""
    rule: Rule | None = None
    expected: str | None = None
    reason: str | None = None
    controls: tuple[str, ...] = ()

    @property
    def control(self) -> bool:
        """Whether the row is a negative control of another."""
        return ".control" in self.id

    @property
    def controlled(self) -> str:
        """The id of the statement that this row is a control of (its own id if it is none)."""
        return self.id.partition(".control")[0]

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data with the keys of a record, nothing measured."""
        return dataclasses.asdict(_record(self))


@dataclasses.dataclass(frozen=True, repr=False)
class Record:
    """What a notebook measured for one row, and the verdict.

    Displayed, it is a box; the output's metadata holds ``{"lowgrad_claim": to_dict()}``.

    Attributes:
        id: As in the row, like ``source`` to ``controls``.
        control: Whether the row is a negative control.
        measure: What was measured, in words.
        predicted: What the statement predicts, in words.
        measured: The measured numbers as text, to four digits.
        statistics: The numbers that decide, unrounded, by ``<statistic> <quantity>``.
        conditions: One entry a condition: tier, condition, measured, met.
        also: Numbers that were supplied though no condition uses them, by statistic and name.
        sizes: The sizes measured at.
        seeds: The seeds used.
        verdict: What follows, or None if nothing was measured.
    """

    id: str
    source: str
    statement: str
    hypotheses: str
    kind: str
    chapter: str
    status: str
    control: bool
    controls: list[str]
    measure: str | None
    predicted: str | None
    measured: str | None
    verdict: str | None
    expected: str | None
    reason: str | None
    sizes: Any = None
    seeds: list[int] | None = None
    statistics: dict[str, float] = dataclasses.field(default_factory=dict)
    conditions: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    also: dict[str, float] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain data that JSON can hold."""
        return dataclasses.asdict(self)

    def __repr__(self) -> str:
        return _box_text(self)

    def _repr_mimebundle_(self, include=None, exclude=None):
        data = {"text/html": _box_html(self), "text/plain": _box_text(self)}
        return data, {"lowgrad_claim": self.to_dict()}


def load_registry(path: str | Path | None = None) -> dict[str, Claim]:
    """Read and check the registry, the rows by id in their order.

    Args:
        path: A TOML file with ``[[claim]]`` tables; the one in the package by default.

    Raises:
        RegistryError: If rows contradict the ledger's rules: one line a problem.

    Example:
        >>> load_registry()["lrg.prop-2.1"].kind
        'identity'
    """
    if path is None:
        return _packaged_registry()
    return _parse_registry(Path(path).read_text(encoding="utf-8"))


def evaluate(
    claim_id: str,
    /,
    *,
    registry: Mapping[str, Claim] | None = None,
    sizes: Any = None,
    seeds: Iterable[int] | None = None,
    **quantities: Any,
) -> Record:
    """Work out the verdict on one statement from what was measured; displays nothing.

    Args:
        claim_id: The row's id.
        registry: Rows by id; the package's by default.
        sizes: The sizes measured at, for the reader: text, a number, a list or a dictionary.
        seeds: The seeds used, such as ``range(10)``.
        **quantities: The measurements by the names that the rule uses. Each is a number, an array
            (list, NumPy or torch), or an estimate: a tuple (value, low, high), or an object with
            attributes value, low and high. Names that no condition uses are shown all the same.

    Returns:
        The record, with the verdict.

    Raises:
        ClaimError: If the id is unknown, the row has no rule yet, a quantity is missing, is NaN or
            infinite, or does not fit the statistic that the rule takes of it.

    Example:
        >>> condition = Condition.parse("max error <= 1e-12")
        >>> rule = Rule("the error", "zero to rounding", {"holds": (condition,)})
        >>> row = Claim("x", "here", "a = a", "identity", "how-to-read", "settled", rule=rule)
        >>> evaluate("x", registry={"x": row}, error=[0.0, 1e-15]).verdict
        'holds'
    """
    claim = _row(claim_id, load_registry() if registry is None else registry)
    rule = claim.rule
    needed = {c.quantity for _, c in rule.conditions}
    missing = sorted(needed - set(quantities))
    if missing:
        raise ClaimError(f"{claim.id}: the rule needs {', '.join(missing)}; pass it by that name")
    samples = {name: _sample(claim.id, name, value) for name, value in quantities.items()}
    statistics = {
        c.measured_name: _statistic(claim.id, c.statistic, c.quantity, samples[c.quantity])
        for _, c in rule.conditions
    }
    also = {
        f"{statistic} {name}": _statistic(claim.id, statistic, name, sample)
        for name, sample in samples.items()
        if name not in needed
        for statistic in _overview(sample)
    }
    return _record(
        claim,
        verdict=rule.verdict(statistics),
        measured=_measured_text({**statistics, **also}) or rule.not_reproducible or "",
        statistics=statistics,
        conditions=[
            {
                "tier": TIERS[tier],
                "condition": c.text,
                "measured": statistics[c.measured_name],
                "met": c.met(statistics[c.measured_name]),
            }
            for tier, c in rule.conditions
        ],
        also=also,
        sizes=_plain(sizes),
        seeds=_seeds(seeds),
    )


def settle(claim_id: str, /, **measurements: Any) -> None:
    """Display the box of one statement, then stop the notebook if the verdict is unexpected.

    Args:
        claim_id: The row's id.
        **measurements: As for `evaluate`.

    Raises:
        ClaimError: As for `evaluate`.
        UnexpectedVerdict: If the verdict differs from the row's ``expected``.

    Example:
        >>> settle("lrg.no-such-row", error=0.0)
        Traceback (most recent call last):
        lowgrad_utils.claims.ClaimError: 'lrg.no-such-row' is not in claims.toml
    """
    record = evaluate(claim_id, **measurements)
    display(record)
    if record.verdict != record.expected:
        raise UnexpectedVerdict(
            f"{record.id}: measured '{record.verdict}', expected '{record.expected}' "
            f"({record.measured})"
        )


def audit(
    records: Iterable[Mapping[str, Any]],
    chapters: Iterable[str],
    registry: Mapping[str, Claim] | None = None,
) -> list[str]:
    """List what is wrong with the records of a whole book, one line a problem.

    Args:
        records: Records as plain data (`Record.to_dict`). A key ``measured_in`` may be added: the
            stem of the notebook in which the record was found.
        chapters: Stems of the notebooks that the book has.
        registry: Rows by id; the package's by default.

    Returns:
        The problems: an unknown id, a row measured twice or in another chapter than its own, a
        verdict that is not the expected one or does not follow from the recorded numbers, a
        settled row never measured, a planned row whose chapter exists. Empty if there is none.

    Example:
        >>> audit([{"id": "lrg.no-such-row"}], [])[0]
        'lrg.no-such-row: measured, but not in claims.toml'
    """
    registry = load_registry() if registry is None else registry
    records, chapters = list(records), set(chapters)
    times = Counter(str(record.get("id")) for record in records)
    problems = []
    for claim_id, number in times.items():
        if claim_id not in registry:
            problems.append(f"{claim_id}: measured, but not in claims.toml")
        elif number > 1:
            where = ", ".join(_measured_in(r) for r in records if str(r.get("id")) == claim_id)
            problems.append(f"{claim_id}: measured {number} times ({where}); settle it once")
    for record in records:
        if str(record.get("id")) in registry:
            problems += _audit_record(record, registry[str(record["id"])])
    for claim in registry.values():
        if claim.status == "settled" and claim.id not in times:
            named = "" if claim.chapter in chapters else ", and _toc.yml must name that chapter"
            problems.append(
                f"{claim.id}: settled, but never measured; chapter '{claim.chapter}' must settle "
                f"it{named}"
            )
        if claim.status == "planned" and claim.chapter in chapters:
            problems.append(
                f"{claim.id}: planned, but its chapter '{claim.chapter}' exists; "
                "settle the row or name the chapter that will"
            )
    return problems


def rules_listing(registry: Mapping[str, Claim] | None = None) -> list[str]:
    """List every row with what decides it, one condition a line.

    Args:
        registry: Rows by id; the package's by default.

    Example:
        >>> condition = Condition.parse("max error <= 1e-12")
        >>> rule = Rule("the error", "zero to rounding", {"holds": (condition,)})
        >>> row = Claim("x", "", "", "identity", "", "settled", rule=rule, expected="holds")
        >>> rules_listing({"x": row})
        ['x: expected holds', 'x: holds if max error <= 1e-12']
    """
    lines = []
    for claim in (load_registry() if registry is None else registry).values():
        lines.append(f"{claim.id}: " + (f"expected {claim.expected}" if claim.rule else "planned"))
        if claim.rule:
            lines += [f"{claim.id}: {TIERS[t]} if {c.text}" for t, c in claim.rule.conditions]
    return lines


# --- statistics -----------------------------------------------------------------------------------


def _interval(values: np.ndarray) -> tuple[float, float]:
    """Return the ends of the 95 % Student-t interval of the mean."""
    half = scipy.special.stdtrit(len(values) - 1, 0.975) * values.std(ddof=1)
    half /= math.sqrt(len(values))
    return float(values.mean() - half), float(values.mean() + half)


# What each statistic is of an array of measurements.
_STATISTICS = {
    "value": lambda values: values.item(),
    "low": lambda values: _interval(values)[0],
    "high": lambda values: _interval(values)[1],
    "min": np.min,
    "max": np.max,
    "median": np.median,
    "mean": np.mean,
    "q05": lambda values: np.quantile(values, 0.05),
    "q95": lambda values: np.quantile(values, 0.95),
    "count": len,
    "all": np.all,
}


def _sample(claim_id: str, name: str, value: Any) -> Estimate | np.ndarray:
    """Return a measurement as an estimate or a flat array, of finite numbers or booleans."""
    fields = Estimate._fields
    if all(hasattr(value, field) for field in fields):
        value = tuple(getattr(value, field) for field in fields)
    elif hasattr(value, "detach"):  # a torch tensor, perhaps on another device or with a gradient
        value = value.detach().cpu().numpy()
    is_estimate = isinstance(value, tuple) and len(value) == 3
    try:
        values = np.asarray(value).ravel()
    except ValueError:  # rows of different lengths
        values = np.empty(0)
    if values.size == 0 or values.dtype.kind not in "biuf":
        shown = repr(value).replace("\n", " ")
        raise ClaimError(
            f"{claim_id}: {name} is {shown[:60]}, but a number, an array of numbers or a tuple "
            "(value, low, high) is needed"
        )
    bad = int((~np.isfinite(values)).sum())
    if bad:
        raise ClaimError(
            f"{claim_id}: {name} has {bad} NaN or infinite numbers; nothing is decided"
        )
    if not is_estimate:
        return values if values.dtype == bool else values.astype(float)
    estimate = Estimate(*(float(v) for v in values))
    if not estimate.low <= estimate.value <= estimate.high:
        raise ClaimError(
            f"{claim_id}: {name} is {tuple(estimate)}, but a tuple of three is an estimate "
            "(value, low, high) in that order; pass three measurements as a list"
        )
    return estimate


def _statistic(claim_id: str, statistic: str, name: str, sample: Estimate | np.ndarray) -> float:
    """Return one statistic of a measurement, or say why there is none."""
    if isinstance(sample, Estimate):
        if statistic in Estimate._fields:
            return getattr(sample, statistic)
        given, needed = "an estimate (value, low, high)", "an array of measurements"
    elif statistic == "value" and sample.size != 1:
        given, needed = f"an array of {sample.size} numbers", "one number or an estimate"
    elif statistic in ("low", "high") and (sample.size < 2 or sample.dtype == bool):
        given, needed = "not numbers with a spread", "an estimate or at least two numbers"
    elif statistic == "all" and sample.dtype != bool:
        given, needed = "numbers", "booleans"
    else:
        return float(_STATISTICS[statistic](sample))
    raise ClaimError(f"{claim_id}: '{statistic} {name}' needs {needed}, but {name} is {given}")


def _overview(sample: Estimate | np.ndarray) -> Sequence[str]:
    """Return the statistics to show of a measurement that no condition uses."""
    if isinstance(sample, Estimate):
        return Estimate._fields
    return ("value",) if sample.size == 1 else ("min", "median", "max")


# --- the registry ---------------------------------------------------------------------------------

_ROW_KEYS = [field.name for field in dataclasses.fields(Claim)]
_ROW_NEEDS = ("id", "source", "statement", "kind", "chapter", "status")
_SETTLED_NEEDS = ("hypotheses", "rule", "expected", "reason")
_RULE_KEYS = ("measure", "predicted", "not_reproducible", *TIERS)


@functools.cache
def _packaged_registry() -> dict[str, Claim]:
    file = resources.files("lowgrad_utils") / "claims.toml"
    return _parse_registry(file.read_text(encoding="utf-8"))


def _parse_registry(text: str) -> dict[str, Claim]:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RegistryError(f"claims.toml is not TOML: {error}") from error
    problems = [f"claims.toml: unknown key '{key}'" for key in document if key != "claim"]
    registry: dict[str, Claim] = {}
    for number, row in enumerate(document.get("claim", []), start=1):
        name = row.get("id") or f"row {number}"
        found = _row_problems(row)
        if name in registry:
            found.append("registered twice")
        problems += [f"{name}: {problem}" for problem in found]
        if not found:
            rule = _rule(row["rule"]) if "rule" in row else None
            controls = tuple(row.get("controls", ()))
            registry[name] = Claim(**{**row, "rule": rule, "controls": controls})
    # Rows left out above would be reported again as missing controls.
    if not problems:
        problems = [p for claim in registry.values() for p in _control_problems(claim, registry)]
    if problems:
        raise RegistryError("\n".join(problems))
    return registry


def _row_problems(row: Mapping[str, Any]) -> list[str]:
    """List what is wrong with one row of the file by itself."""
    problems = [f"unknown key '{key}'" for key in row if key not in _ROW_KEYS]
    needed = _ROW_NEEDS + (_SETTLED_NEEDS if row.get("status") == "settled" else ())
    problems += [f"has no {key}" for key in needed if not row.get(key)]
    for key, options in (
        ("kind", KINDS),
        ("status", ("planned", "settled")),
        ("expected", VERDICTS),
    ):
        if row.get(key) and row[key] not in options:
            problems.append(f"{key} is {row[key]!r}, but one of {', '.join(options)} is needed")
    for key in ("id", "source", "statement", "hypotheses", "chapter", "reason"):
        if not isinstance(row.get(key, ""), str):
            problems.append(f"{key} is {row[key]!r}, but text is needed")
    controls = row.get("controls", [])
    if not (isinstance(controls, list) and all(isinstance(c, str) for c in controls)):
        problems.append(f"controls is {controls!r}, but a list of ids is needed")
    if row.get("rule"):
        problems += _rule_problems(row["rule"])
    return problems


def _rule_problems(rule: Any) -> list[str]:
    if not isinstance(rule, dict):
        return [f"rule is {rule!r}, but a table is needed"]
    problems = [f"unknown key 'rule.{key}'" for key in rule if key not in _RULE_KEYS]
    if not rule.get("measure"):
        problems.append("has no rule.measure")
    if "predicted" not in rule:
        problems.append('has no rule.predicted ("" if it predicts no number)')
    tiers = [tier for tier in TIERS if tier in rule]
    if bool(tiers) == bool(rule.get("not_reproducible")):
        problems.append(f"rule needs either conditions ({', '.join(TIERS)}) or not_reproducible")
    for tier in tiers:
        if not isinstance(rule[tier], list) or not rule[tier]:
            problems.append(f"rule.{tier} is {rule[tier]!r}, but a list of conditions is needed")
            continue
        for text in rule[tier]:
            try:
                Condition.parse(text)
            except ValueError as error:
                problems.append(f"rule.{tier}: {error}")
    return problems


def _rule(rule: Mapping[str, Any]) -> Rule:
    return Rule(
        measure=rule["measure"],
        predicted=rule["predicted"],
        tiers={t: tuple(Condition.parse(c) for c in rule[t]) for t in TIERS if t in rule},
        not_reproducible=rule.get("not_reproducible"),
    )


def _control_problems(claim: Claim, registry: Mapping[str, Claim]) -> list[str]:
    """List what is wrong with a row's negative controls, or with the row as a control."""
    if claim.control:
        parent = registry.get(claim.controlled)
        problems = []
        if parent is None or claim.id not in parent.controls:
            problems.append(f"{claim.id}: no row '{claim.controlled}' lists it in its controls")
        if claim.controls:
            problems.append(f"{claim.id}: a control has no controls of its own")
        if claim.expected not in (None, "fails"):
            problems.append(
                f"{claim.id}: expected is '{claim.expected}', but a control breaks a hypothesis to "
                "see the conclusion fail"
            )
        return problems
    problems = []
    for control in claim.controls:
        if not control.startswith(f"{claim.id}.control"):
            problems.append(f"{claim.id}: control '{control}' is not named '{claim.id}.control...'")
        elif control not in registry:
            problems.append(f"{claim.id}: control '{control}' is not registered")
        elif claim.status == "settled" and registry[control].status != "settled":
            problems.append(f"{claim.id}: settled, but its control '{control}' is only planned")
    unmeasured = claim.rule is not None and claim.rule.not_reproducible
    needs_control = claim.status == "settled" and claim.kind in THEOREMS and not unmeasured
    if needs_control and not claim.controls:
        problems.append(f"{claim.id}: a settled {claim.kind} needs at least one control")
    return problems


def _row(claim_id: str, registry: Mapping[str, Claim]) -> Claim:
    if claim_id not in registry:
        raise ClaimError(f"{claim_id!r} is not in claims.toml")
    claim = registry[claim_id]
    if claim.status != "settled" or claim.rule is None:
        raise ClaimError(
            f"{claim_id}: the row is planned; give it a rule, the expected verdict and a reason in "
            "claims.toml, and status = 'settled', before measuring"
        )
    return claim


# --- records --------------------------------------------------------------------------------------


def _record(claim: Claim, **measured: Any) -> Record:
    """Return the record of a row with what was measured, or with nothing measured."""
    return Record(
        **{
            "id": claim.id,
            "source": claim.source,
            "statement": claim.statement,
            "hypotheses": claim.hypotheses,
            "kind": claim.kind,
            "chapter": claim.chapter,
            "status": claim.status,
            "control": claim.control,
            "controls": list(claim.controls),
            "measure": claim.rule.measure if claim.rule else None,
            "predicted": claim.rule.predicted if claim.rule else None,
            "measured": None,
            "verdict": None,
            "expected": claim.expected,
            "reason": claim.reason,
            **measured,
        }
    )


def _measured_in(record: Mapping[str, Any]) -> str:
    return str(record.get("measured_in", record.get("chapter")))


def _audit_record(record: Mapping[str, Any], claim: Claim) -> list[str]:
    """List what is wrong with one record, given its row."""
    if claim.rule is None:
        return [f"{claim.id}: measured, but the row is planned and has no rule"]
    problems = []
    if _measured_in(record) != claim.chapter:
        problems.append(
            f"{claim.id}: measured in '{_measured_in(record)}', but its chapter is "
            f"'{claim.chapter}'"
        )
    try:
        verdict = claim.rule.verdict(record.get("statistics", {}))
    except (KeyError, TypeError) as error:
        return [*problems, f"{claim.id}: the record lacks {error}, which the rule needs; rerun it"]
    if record.get("verdict") != verdict:
        problems.append(
            f"{claim.id}: the record says '{record.get('verdict')}', but its numbers give "
            f"'{verdict}'"
        )
    if verdict != claim.expected:
        problems.append(f"{claim.id}: measured '{verdict}', expected '{claim.expected}'")
    return problems


def _plain(value: Any) -> Any:
    """Return sizes as text, numbers, lists and dictionaries that JSON can hold."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Iterable):
        return [_plain(entry) for entry in value]
    raise ClaimError(f"sizes is {value!r}, but text, a number, a list or a dictionary is needed")


def _seeds(seeds: Iterable[int] | None) -> list[int] | None:
    if seeds is None:
        return None
    if isinstance(seeds, str) or not isinstance(seeds, Iterable):
        raise ClaimError(f"seeds is {seeds!r}, but the seeds themselves are needed: range(10)")
    return [int(seed) for seed in seeds]


def _number(value: float) -> str:
    return f"{value:.4g}"


def _measured_text(statistics: Mapping[str, float]) -> str:
    return "; ".join(f"{name} = {_number(value)}" for name, value in statistics.items())


def _sizes_text(sizes: Any) -> str:
    if isinstance(sizes, Mapping):
        return ", ".join(f"{key} = {_sizes_text(value)}" for key, value in sizes.items())
    if isinstance(sizes, list):
        return ", ".join(_sizes_text(value) for value in sizes)
    return str(sizes)


def _seeds_text(seeds: Sequence[int]) -> str:
    if len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[0] + len(seeds))):
        return f"{seeds[0]} to {seeds[-1]} ({len(seeds)} seeds)"
    return ", ".join(str(seed) for seed in seeds)


# --- the box --------------------------------------------------------------------------------------


def _condition_lines(record: Record) -> list[str]:
    """Return one line a condition; one that stands in several tiers is told once."""
    tiers: dict[str, list[str]] = {}
    for c in record.conditions:
        mark = "✓ met" if c["met"] else "✗ not met"
        line = f"{mark}: {c['condition']}, measured {_number(c['measured'])}"
        tiers.setdefault(line, []).append(c["tier"])
    if len({c["tier"] for c in record.conditions}) == 1:
        return list(tiers)
    return [f"{line} (needed for: {', '.join(names)})" for line, names in tiers.items()]


def _box_rows(record: Record) -> list[tuple[str, list[str]]]:
    """Return what the box says at once, as labels with one or more lines each."""
    sizes = [] if record.sizes is None else [_sizes_text(record.sizes)]
    seeds = [f"seeds {_seeds_text(record.seeds)}"] if record.seeds else []
    rows = [
        ("Predicted", [record.predicted]),
        ("Measured", _condition_lines(record) or [record.measured]),
        ("Over", ["; ".join(sizes + seeds)]),
    ]
    return [(label, lines) for label, lines in rows if any(lines)]


def _detail_rows(record: Record) -> list[tuple[str, list[str]]]:
    """Return what the box says to those who unfold it."""
    also = [f"{name} = {_number(value)}" for name, value in record.also.items()]
    rows = [
        ("Source", [f"{record.source} ({record.kind})"]),
        ("Hypotheses", [record.hypotheses]),
        ("Measure", [record.measure]),
        ("Also", [", ".join(also)] if record.conditions else []),
        ("Expected", [record.expected]),
        ("Why these numbers", [record.reason]),
    ]
    return [(label, lines) for label, lines in rows if any(lines)]


def readable(text: str) -> str:
    """Return a text of the ledger with letters and signs where it spells them out, ``nu`` as ν.

    The ledger is written in what every keyboard has; names of measured quantities, such as
    ``beta_error``, stay as they are.

    Args:
        text: A statement, a hypothesis or a reason.

    Example:
        >>> readable("lambda_1(G_{1+2}) = Theta(n^(2 nu - 1/2)), not beta_error")
        'λ₁(G₁₊₂) = Θ(n^(2 ν - 1/2)), not beta_error'
        >>> readable("|X_B^T r|^2 <= sqrt(m)")
        '|X_Bᵀ r|² ≤ √(m)'
    """
    text = _SIGN.sub(lambda found: _SIGNS[found[0]], text)
    text = _SPELLED.sub(lambda found: _GREEK[found[0]], text)
    return _SUBSCRIPT.sub(lambda found: found[found.lastgroup].translate(_LOWERED), text)


def _headline(record: Record) -> str:
    if record.verdict == record.expected:
        return f"{record.verdict}, as the book says"
    return f"✗ {record.verdict}, but the book says: {record.expected}"


def _title(record: Record) -> str:
    return f"Negative control {record.id}" if record.control else f"Claim {record.id}"


def _box_text(record: Record) -> str:
    lines = [f"{_title(record)}: {record.statement}", f"  Verdict: {_headline(record)}"]
    for label, entries in _box_rows(record) + _detail_rows(record):
        lines += [f"  {label}: {entry}" for entry in entries]
    return "\n".join(lines)


def _definitions(rows: Iterable[tuple[str, str]]) -> str:
    """Return a definition list in two columns, which wraps well on a narrow screen."""
    cells = "".join(
        f'<dt style="margin:0;font-weight:600">{label}</dt>'
        f'<dd style="margin:0;min-width:0">{content}</dd>'
        for label, content in rows
    )
    return (
        '<dl style="display:grid;grid-template-columns:max-content minmax(0,1fr);'
        f'column-gap:.8em;row-gap:.2em;margin:0;font-size:.9em">{cells}</dl>'
    )


def _box_html(record: Record) -> str:
    # Colours and fonts are inherited, so that the box follows any page, light or dark; only the
    # layout is set.
    def escaped(rows: list[tuple[str, list[str]]]) -> list[tuple[str, str]]:
        line = '<div style="overflow-wrap:anywhere">{}</div>'
        # What was measured is named as in the code.
        shown = [(k, v if k in ("Measured", "Also") else map(readable, v)) for k, v in rows]
        return [(k, "".join(line.format(html.escape(text)) for text in v)) for k, v in shown]

    verdict = ("Verdict", f"<strong>{html.escape(_headline(record))}</strong>")
    return (
        f'<div class="lg-claim" id="claim-{html.escape(record.id)}" style="border:1px solid;'
        'border-left-width:6px;border-radius:4px;padding:.6em .8em;margin:.5em 0;line-height:1.4">'
        f'<div style="font-size:.85em;overflow-wrap:anywhere">{html.escape(_title(record))}</div>'
        f'<div style="font-weight:600;margin:.2em 0 .5em">'
        f"{html.escape(readable(record.statement))}</div>"
        f"{_definitions([verdict, *escaped(_box_rows(record))])}"
        '<details style="margin-top:.4em"><summary style="font-size:.9em">Source, hypotheses and '
        f"why these numbers</summary>{_definitions(escaped(_detail_rows(record)))}</details></div>"
    )
