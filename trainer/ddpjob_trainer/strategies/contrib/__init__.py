"""Strategies with less support than ddp, fsdp, pipeline and single.

dp and ddp_mp appear in older tutorials and are kept for comparison; use ddp and fsdp instead.
horovod and deepspeed need libraries that are installed separately (scripts/install_horovod.py
builds Horovod's last release from source; `pip install deepspeed`), and are tested only if these
libraries are installed. parameter_server is the synchronous variant of the parameter-server
architecture, and is meant for study.

The strategies in this folder give the same guarantees about exactness, checkpoints and resuming as
the other strategies. The only exception is dp, which is not exact on several GPUs. New features may
not work with these strategies.
"""
