"""Strategies with less support than ddp, fsdp, pipeline and single.

dp and ddp_mp appear in older tutorials and are kept for comparison; ddp and fsdp replace them.
horovod and deepspeed need libraries that are installed separately (scripts/install_horovod.py
builds Horovod's last release from source; `pip install deepspeed`), and are tested only where these
are installed. parameter_server is the synchronous form of an architecture for study.

All keep the same promises on exactness, checkpoints and resuming. New features may not support
them.
"""
