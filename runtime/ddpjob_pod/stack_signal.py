"""The signal on which a rank writes its Python stack, and the folder in which stacks are kept.

In a job, `worker.py` makes the signal write to the launcher's file. The launcher collects the
stacks of a hang for `ddpjob stacks`. Elsewhere, the built-in trainer writes to its own file.
"""

import signal

# Python, torch and batch systems do not use this signal. macOS has no real-time signals.
SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1
FOLDER = "stacks"
"""Name of the folder, in the checkpoint folder (in a job) or in the run's folder (elsewhere)."""
