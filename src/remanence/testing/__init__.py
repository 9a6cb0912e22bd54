"""Checkers for authors of methods, engines and models.

Each checker runs your object in float64 on a small built-in task, and raises AssertionError with a
sentence that names the problem and its cause. Use them in your own tests:

    from remanence.testing import check_method

    def test_my_method() -> None:
        check_method(my_method(strength=0.5) + wsm())

`method_checks` (with `part_checks` and `disclosure_checks`), `engine_checks` and `model_checks`
hold one checker each, `running` what they share, `toy_task` the built-in task and how results are
compared.
The package may import all packages below the applications; nothing but tests and `extend` imports
it.
"""

from remanence.testing.engine_checks import check_engine
from remanence.testing.method_checks import check_method
from remanence.testing.model_checks import check_model
from remanence.testing.running import TOLERANCE

__all__ = ["TOLERANCE", "check_engine", "check_method", "check_model"]
