"""Strategies with less support than ddp, fsdp, pipeline and single.

dp and ddp_mp are what older tutorials teach: kept for comparison, ddp and fsdp replace them. horovod and deepspeed need
libraries that are installed separately (Horovod's last release is built from source by scripts/install_horovod.py; `pip
install deepspeed`), and are tested only where these are installed. parameter_server is the synchronous form of an
architecture for study.

All hold the same promises on exactness, checkpoints and resuming. New features may not support them.
"""
