"""The signal on which a rank writes its Python stack, and the folder in which stacks are kept.

In a job, `worker.py` makes the signal write the stack to a file that the launcher has prepared.
When ranks hang, the launcher collects these files for `ddpjob stacks`. Outside a job, the built-in
trainer chooses the file.
"""

import signal

# Python, torch and batch systems do not use this signal. macOS needs a different signal, because it
# has no real-time signals.
SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1
FOLDER = "stacks"
"""Name of the folder with stacks. In a job, this folder is in the checkpoint folder. Outside a job,
it is in the run's folder.
"""
