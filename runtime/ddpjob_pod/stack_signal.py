"""The signal on which a rank writes its Python stack, and the folder in which stacks are kept.

In a job, `worker.py` lets the signal write the stack to a file that the launcher has prepared. When
ranks hang, the launcher collects these files for `ddpjob stacks`. Outside a job, the built-in
trainer chooses the file.
"""

import signal

# Python, torch and batch systems do not use this signal. macOS has no real-time signals, so it
# needs a different one.
SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1
FOLDER = "stacks"
"""Name of the folder with stacks. In a job, it is in the checkpoint folder; elsewhere, it is in the
run's folder.
"""
