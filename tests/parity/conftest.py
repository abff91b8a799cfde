"""Engine cores are forked."""

from tests.support.forked_cores import forked_cores  # noqa: F401 - a fixture
