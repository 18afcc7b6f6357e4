"""The signal at which a rank writes its Python stack, and the folder in which stacks are kept.

Under a job's launcher, `worker.py` has the signal write to a file of the launcher's, from which the
launcher collects the stacks of a hang, and `ddpjob stacks` reads. Anywhere else, the built-in
trainer has it write to its own file.
"""

import signal

# Neither Python nor torch nor a batch system uses it. macOS has no such signals.
SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1
FOLDER = "stacks"
"""Name of the folder: of the checkpoint folder in a job, otherwise of a run's."""
