"""An assignment with a choice grades each choice: mistakes lose their points whatever was chosen.

The source has right answers for every claim. Here each is spoilt in one place at a time.
"""

import re

import pytest
from course_examples import answers_only, submission, with_cell

from lowgrad_utils.claims import load_registry

NAME = "break-a-claim"
# claim: (question, points lost, what stands there, what stands there instead)
MISTAKES = {
    "weights": [
        ("q2", 2, 'torch.linalg.svdvals(case["W"])[0] ** 2', 'case["W"].norm() ** 2'),
        ("q3", 3, "(slopes - 0.5)", "slopes"),
        ("q4", 1, "turned((1 - dial) * W + dial * q)", "(1 - dial) * W + dial * q"),
        ("q8", 1, "[seed, 1]).standard_normal(case", "[seed, 1]).uniform(size=case"),
    ],
    "tails": [
        ("q2", 2, 'abs(case["noise"])', 'case["noise"]'),
        ("q3", 3, "np.max(np.abs(r))", "np.max(r)"),
        ("q3", 3, " / np.log(len(r))", ""),
        ("q4", 1, "stats.t.ppf(uniform, 1 / dial)", "9 * dial * stats.norm.ppf(uniform)"),
    ],
    "signs": [
        ("q2", 2, 'abs(case["a"].sum())', 'case["a"].sum()'),
        ("q3", 3, '@ case["a"] / len(case["a"])', '@ case["a"] / len(case["a"]) ** 0.5'),
        ("q4", 1, "stream) < dial\n    return", "stream) < dial / 2\n    return"),
        ("q8", 1, 'torch.where(flipped, fresh, case["a"])', 'torch.where(flipped, 1.0, case["a"])'),
    ],
    "one-sign": [
        ("q2", 1, "0.5 - 0.5 * r.sum() / r.abs().sum()", "(r < 0).double().mean()"),
        ("q3", 3, "(ends.min() - low)", "(0 - low)"),
        ("q4", 2, "zeta=n**0.375", "zeta=n**0.25"),
        ("q8", 1, "+ 2 * dial * other", "- 2 * dial * other"),
    ],
    "classes": [
        ("q3", 3, "within / len(own) / C", "within / n"),
        ("q3", 3, "within / len(own) / C", "within / (len(own) - 1) / C"),
        ("q4", 1, "round(0.6 * dial * n)", "round(dial * n)"),
        ("q8", 1, "torch.where(share, 3 - case", "torch.where(share, 0 * case"),
    ],
    "centres": [
        ("q2", 2, "(torch.softmax(case", "(torch.softmax(2 * case"),
        ("q3", 3, "p[:, k].sqrt()", "p[:, k]"),
        ("q3", 3, "if k != c:", "if k >= 0:"),
        ("q4", 1, '"B": dial * B', '"B": (1 + dial) * B'),
        ("q8", 1, "torch.ones(4, 1).double()", "torch.arange(4.0)[:, None].double()"),
    ],
}
CASES = [
    pytest.param(claim, *mistake, id=f"{claim}-{mistake[0]}-{k}")
    for claim, mistakes in MISTAKES.items()
    for k, mistake in enumerate(mistakes)
]


def _right_answers(assignment, claim):
    (cell,) = [c for c in assignment.of_kind("right") if f'"{claim}"' in c.text]
    return cell.text


def _row(assignment, grader, text):
    row = grader.grade(submission(with_cell(answers_only(assignment), text)))
    return {name: float(row[name]) for name in assignment.questions}, row["message"]


@pytest.mark.parametrize(("claim", "question", "points", "old", "new"), CASES)
def test_mistake_loses_its_points(claim, question, points, old, new, assignments, graders):
    assignment = assignments[NAME]
    text = _right_answers(assignment, claim)
    assert text.count(old) == 1
    found, message = _row(assignment, graders[NAME], text.replace(old, new))
    expected = {**assignment.questions}
    expected[question] -= points
    assert found == expected, message


def test_claim_outside_of_the_list_is_told_so(assignments, graders):
    assignment = assignments[NAME]
    text = _right_answers(assignment, "tails").replace('"tails"', '"lrg.fig-1"')
    found, message = _row(assignment, graders[NAME], text)
    assert "'lrg.fig-1', none of the list" in message
    assert {name for name, points in found.items() if points} == {"q5", "q6", "q7"}


def test_every_claim_has_a_right_answer(assignments):
    space = {}
    exec(assignments[NAME].of_kind("code")[0].text, space)
    claims = set(space["KIND"])
    assert claims == set(space["TURNED"]) == {"concentration", *MISTAKES}


def test_claims_are_rows_of_the_ledger(assignments):
    (text,) = [c.text for c in assignments[NAME].of_kind("markdown") if "## The claims" in c.text]
    named = re.findall(r"`((?:lrg|tlh|new)\.[\w.-]+)`", text)
    assert len(named) == 7
    assert set(named) <= set(load_registry())
