"""The random walk of `rolling_machine` over roll outs without gates."""

from hypothesis import settings

from tests.operator.pdcluster_api.plan.rollout.rolling_machine import RollingMachine

TestRolling = RollingMachine.TestCase
TestRolling.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
