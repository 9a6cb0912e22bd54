"""Equation 3 of Flashback by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import flashback as reference

from remanence.losses.dynamic_distillation import distill, label_shares


def numbers(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_alpha_by_hand() -> None:
    """nu = (4, 0, 0); teachers (6, 1, 0) and (2, 3, 0). Seen: 4+6+2 = 12, 0+1+3 = 4, nothing:
    alpha = (1/2, 1/4, 0) and (1/6, 3/4, 0).
    """
    alpha = label_shares(numbers(4, 0, 0), numbers([6, 1, 0], [2, 3, 0]))
    assert torch.allclose(alpha, numbers([1 / 2, 1 / 4, 0], [1 / 6, 3 / 4, 0]), rtol=0, atol=1e-15)


def test_pi_stands_twice_at_the_server() -> None:
    """nu = pi = (5, 5), a client with (10, 0) and the previous model with pi: 5+10+5 = 20 and
    5+0+5 = 10, so (1/2, 0) and (1/4, 1/2).
    """
    pi = numbers(5, 5)
    assert torch.equal(
        label_shares(pi, torch.stack([numbers(10, 0), pi])), numbers([1 / 2, 0], [1 / 4, 1 / 2])
    )


@given(st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), min_size=2, max_size=6))
def test_alpha_sums_to_what_the_student_lacks(rows: list[list[int]]) -> None:
    """sum_i alpha_i = 1 - nu / seen where a class was seen, else 0; the reference agrees."""
    nu, mu = numbers(*rows[0]), numbers(*rows[1:])
    alpha, seen = label_shares(nu, mu), nu + mu.sum(dim=0)
    wanted = torch.where(seen > 0, 1 - nu / seen.clamp(min=1), torch.zeros_like(seen))
    assert torch.allclose(alpha.sum(dim=0), wanted, rtol=0, atol=1e-12)
    written_out = reference.dynamic_alpha(
        [float(n) for n in rows[0]], [[float(m) for m in row] for row in rows[1:]]
    )
    assert torch.allclose(alpha, numbers(*written_out), rtol=0, atol=1e-15)


def test_distil_by_hand() -> None:
    """p = (1/2, 1/4, 1/4) and, of a second teacher, (1/4, 1/4, 1/2); q = (1/4, 1/2, 1/4); alpha =
    (1, 1/2, 1) and (0, 1/2, 1).

    First: 1/2 log 2 + 1/2 * 1/4 * log(1/2) + 0 = 3/8 log 2. Second: 0 + 1/2 * 1/4 * log(1/2) + 1/2
        log 2 = 3/8 log 2. Together 3/4 log 2.
    """
    q, teachers = (
        numbers([1 / 4, 1 / 2, 1 / 4]),
        numbers([[1 / 2, 1 / 4, 1 / 4]], [[1 / 4, 1 / 4, 1 / 2]]),
    )
    rows = distill(torch.log(q) + 7, torch.log(teachers) - 2, numbers([1, 1 / 2, 1], [0, 1 / 2, 1]))
    assert rows.shape == (1,)
    assert float(rows) == pytest.approx(3 / 4 * math.log(2), abs=1e-14)


def test_a_student_is_drawn_to_its_teacher() -> None:
    """With alpha = 1 the gradient with respect to the student's logits is q - p."""
    student = numbers([0.0, 1.0, -1.0]).requires_grad_()
    teacher = numbers([[2.0, 0.0, 1.0]])
    distill(student, teacher, torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    assert student.grad is not None
    wanted = torch.softmax(student.detach(), dim=1) - torch.softmax(teacher[0], dim=1)
    assert torch.allclose(student.grad, wanted, rtol=0, atol=1e-15)


def test_a_teacher_that_is_certain_gives_no_nan() -> None:
    """Logits 2000 apart: p is exactly (1, 0, 0), and 0 * log(0 / q) counts 0. What is left is
    -log q_1 = log 3.
    """
    student = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    rows = distill(student, numbers([[2000.0, 0.0, 0.0]]), torch.ones(1, 3, dtype=torch.float64))
    assert float(rows.detach()) == pytest.approx(math.log(3), abs=1e-14)
    assert bool(torch.isfinite(torch.autograd.grad(rows.sum(), student)[0]).all())
