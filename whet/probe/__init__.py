"""Will this pay on my model? A few rollouts on a few prompts, and what they say about training on them.

`whet probe` calls `run_probe`, then `probe_report`. No torch here: engine and judge are given.
"""

from whet.probe.report import ProbeReport, probe_report
from whet.probe.run import run_probe

__all__ = ["ProbeReport", "probe_report", "run_probe"]
