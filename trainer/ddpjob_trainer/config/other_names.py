"""Maps the settings of other trainers and tutorials to this trainer's keys, and explains
differences.
"""

from __future__ import annotations

_PER_PROCESS = " (data.batch is the total over all ranks; multiply a value per process by the number of ranks)"
_RANKS = "the number of ranks is set by torchrun, --spawn N, or the job's nodes and procsPerNode"
_OWN = "the data set determines it"

KEYS = {
    # Each entry maps space-separated names from other trainers to this trainer's key, with a remark
    # on any difference.
    "batch_size b bs train_batch_size per_device_train_batch_size per_gpu_batch_size micro_batch_size"
    " train_micro_batch_size_per_gpu per_gpu_train_batch_size": "data.batch" + _PER_PROCESS,
    "global_batch_size total_batch_size": "data.batch",
    "lr learning_rate base_lr lr_base": "optim.lr",
    "epochs num_epochs epoch num_train_epochs max_epochs n_epochs nb_epochs total_epochs": "train.epochs",
    "data data_dir data_path dataset_dir data_root root train_dir": "data.dir",
    "dataset data_set": "data.name",
    "dataset_download": "data.download",
    "arch a model net network": "model.name (torchvision's models as torchvision:resnet50)",
    "workers num_workers j dataloader_num_workers": "data.workers (per rank)",
    "resume_from_checkpoint finetune init_checkpoint initial_checkpoint load_from": "checkpoint.load"
    " (weights to start from; a run resumes from checkpoint.dir automatically)",
    "pretrained weights": "model.pretrained (default, a name of the library's weights, or a file)",
    "dist_backend backend ddp_backend distributed_backend accelerator device no_cuda cpu": "train.backend",
    "amp use_amp fp16 bf16 mixed_precision precision half native_amp apex apex_amp": "amp.level"
    " (amp.level=O1, with amp.dtype=float16 or bfloat16)",
    "opt_level optimization_level": "amp.level",
    "amp_dtype": "amp.dtype",
    "loss_scale static_loss_scale": "amp.loss_scale (a number, dynamic or auto)",
    "keep_batchnorm_fp32": "amp.level (O2 keeps batch normalization in float32)",
    "seed random_seed manual_seed": "data.seed",
    "model_dir output_dir output save_dir checkpoint_dir save_path ckpt_dir default_root_dir"
    " checkpoint_path": "checkpoint.dir",
    "log_dir run_dir": "train.run_dir",
    "wd decay": "optim.weight_decay",
    "norm_weight_decay bias_weight_decay": "optim.decay_norm_and_bias",
    "opt optimizer optim": "optim.name",
    "layer_decay layerwise_lr_decay llrd": "optim.layer_decay",
    "drop_path_rate stochastic_depth_prob stochastic_depth": "model.drop_path (ResNets)",
    "lr_scheduler lr_scheduler_type sched scheduler": "optim.schedule",
    "lr_step_size step_size lr_steps lr_milestones decay_epochs": "optim.milestones (epochs, such as 30,60,80)",
    "lr_gamma decay_rate": "optim.gamma",
    "lr_warmup_epochs warmup warmup_steps": "optim.warmup_epochs (epochs, fractions allowed)",
    "clip_grad clip_grad_norm max_grad_norm grad_clip gradient_clipping gradient_clip_val": "optim.clip_norm",
    "gradient_accumulation_steps accumulate_grad_batches grad_accum_steps accumulation_steps accum_iter"
    " batches_per_allreduce": "train.accumulate (data.batch remains the batch of a whole step)",
    "smoothing": "optim.label_smoothing",
    "bce_loss criterion loss_fn": "optim.loss (cross_entropy, bce, mse, l1, huber or package.module:function)",
    "callbacks": "train.callbacks (package.module:name)",
    "param_groups": "optim.groups (PATTERN=RATE)",
    "model_ema model_ema_decay ema": "optim.ema_decay (such as 0.999, per step)",
    "sync_bn syncbn use_sync_bn sync_batchnorm": "model.sync_batchnorm",
    "torchcompile torch_compile": "model.compile (default, reduce-overhead or max-autotune)",
    "print_freq log_interval log_every_n_steps logging_steps steps_per_print": "train.log_every (steps)",
    "val_batch_size eval_batch_size test_batch_size validation_batch_size"
    " per_device_eval_batch_size": "train.eval_batch",
    "check_val_every_n_epoch eval_interval": "train.eval_every (epochs)",
    "save_freq save_every save_interval save_every_epoch": "checkpoint.every_epochs",
    "save_steps save_every_n_steps": "checkpoint.every_steps",
    "save_total_limit checkpoint_hist": "checkpoint.keep",
    "image_size img_size train_crop_size input_size": "data.image_size",
    "auto_augment aa randaugment": "data.randaugment_ops"
    " (usually 2; data.randaugment_magnitude goes up to 30, so write 27 for timm's m9, which is 9 of 10)",
    "mixup_alpha": "data.mixup",
    "random_erase reprob random_erasing": "data.erase (a probability, such as 0.1)",
    "aug_repeats ra_reps ra_sampler repeated_aug": "data.repeats (augmented versions of each sample, such as 3)",
    "ta_wide trivial_augment": "data.trivialaugment",
    "val_crop_size test_input_size": "data.test_image_size",
    "crop_pct": "data.test_crop",
    "cutmix_alpha": "data.cutmix",
    "deepspeed_config": "deepspeed.config (with strategy=deepspeed)",
    "zero_stage zero": "deepspeed.stage (with strategy=deepspeed)",
    "fp16_allreduce": "horovod.compression (horovod.compression=fp16, with strategy=horovod)",
    "run_name experiment exp_name": "train.name",
    "wandb_project": "report.wandb",
    "timeout": "train.timeout_seconds",
}

ADVICE = {
    # Each entry maps space-separated names from other trainers to advice, because this trainer has
    # no such key.
    "resume continue auto_resume": "that is the default: a run continues from the newest checkpoint in checkpoint.dir"
    " (to start from the weights in a file instead, set checkpoint.load=FILE)",
    "world_size n nproc nproc_per_node nprocs num_processes gpus num_gpus devices n_gpu": _RANKS,
    "nodes nnodes num_nodes num_machines": _RANKS,
    "rank node_rank machine_rank": "set by torchrun (RANK), or by --spawn N --nodes K --node-rank R",
    "gpu gpu_id gpu_ids device_ids": "each rank uses the device of its local rank; select devices with"
    " CUDA_VISIBLE_DEVICES",
    "dist_url init_method master_addr master_port port dist_init_method": "set by torchrun, or by"
    " --spawn N --init tcp://HOST:PORT",
    "multiprocessing_distributed spawn": "--spawn N starts N ranks",
    "evaluate eval test test_only e do_eval": "python -m ddpjob_trainer evaluate CHECKPOINT",
    "num_classes classes": _OWN,
    "gradient_as_bucket_view": "strategy=ddp always sets it",
    "static_graph bucket_cap_mb": "there is no such key; strategy=ddp uses torch's default",
    "find_unused_parameters": "strategy=ddp needs a gradient for every parameter; set model.freeze=NAMES for"
    " parameters that the forward pass does not use",
    "lr_warmup_method lr_warmup_decay warmup_lr": "the warm-up is linear, from zero",
    "model_ema_steps": "the average is updated at each step",
    "start_epoch": "a run continues at the epoch of its newest checkpoint",
    "pin_memory persistent_workers prefetch_factor shuffle drop_last": "the data loader sets this itself",
}


def _split(names: dict[str, str]) -> dict[str, str]:
    return {name: text for together, text in names.items() for name in together.split()}


_MEANT = {name: text.partition(" ") for name, text in _split(KEYS).items()}
_REMARKS = {name: f"; did you mean {key!r}?{space}{remark}" for name, (key, space, remark) in _MEANT.items()}
_REMARKS |= {name: f": {text}" for name, text in _split(ADVICE).items()}


def key(name: str) -> str | None:
    """Return this trainer's key for another trainer's name, or None if there is no such key."""
    return _MEANT[name][0] if name in _MEANT else None


def remark(name: str) -> str | None:
    """Return a remark on another trainer's option, to append to an error message.

    Return None if the option is unknown.
    """
    return _REMARKS.get(name.lstrip("-").replace("-", "_").lower())
