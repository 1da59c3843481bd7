"""Plans that are estimated by the closed form and predicted by passes in virtual time."""

from engines.planning.closed_form_planner import ClosedFormPlanner, Prediction
from engines.planning.engine_pass import simulated_pass
from harness.api import OffloadPolicy


class SimulatedPlanner(ClosedFormPlanner):
    """Predicts by simulating one pass of each kind; the closed form, which is faster, ranks what a search tries."""

    def predict(self, policy: OffloadPolicy) -> Prediction:
        """For a policy with all fractions, whether it fits or not. Raises as ClosedFormPlanner.predict."""
        return self._predicted(policy, simulated_pass)
