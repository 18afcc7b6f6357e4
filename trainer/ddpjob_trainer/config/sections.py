"""Every section of the configuration: frozen dataclasses whose fields are keys.

The string below a field is its help text. Sections import no implementation, so that any module can
import them; the modules that use a value check it.
"""

from __future__ import annotations

import difflib
import enum
from dataclasses import dataclass, field
from pathlib import Path

from ddpjob_trainer.config.loader import from_env
from ddpjob_trainer.errors import ConfigError


class StrategyName(enum.StrEnum):
    """Names of the strategies."""

    SINGLE = "single"
    DP = "dp"
    DDP = "ddp"
    HOROVOD = "horovod"
    DEEPSPEED = "deepspeed"
    PARAMETER_SERVER = "parameter_server"
    FSDP = "fsdp"
    DDP_MP = "ddp_mp"
    PIPELINE = "pipeline"


class DataName(enum.StrEnum):
    """Names of the data sets."""

    DIGITS = "digits"
    CIFAR10 = "cifar10"
    CIFAR100 = "cifar100"
    IMAGEFOLDER = "imagefolder"
    SHARDS = "shards"
    SHAPES = "shapes"
    SYNTHETIC = "synthetic"


class Corrupt(enum.StrEnum):
    """How an image that cannot be decoded is handled."""

    SKIP = "skip"
    STOP = "stop"


class Decoder(enum.StrEnum):
    """Decoders of training images."""

    AUTO = "auto"
    DALI = "dali"


@dataclass(kw_only=True, slots=True, frozen=True)
class DataConfig:
    """The data set and how its samples are dealt out."""

    name: str = "digits"
    """digits: 1797 real images of 8x8 pixels that ship with scikit-learn. cifar10, cifar100: the folders that the
    official archives unpack to; prefer the binary version, which needs no pickle, to the python version. imagefolder:
    train/ and val/ with one folder of images per class. shards: train/ and val/ with tar files of KEY.jpg and KEY.cls
    (WebDataset's layout), as `python -m ddpjob_trainer shards` makes them. shapes: ten classes of shapes, generated,
    16x16 pixels in colour, the same on any machine; hard enough to compare recipes. synthetic: a pattern per class
    and noise, generated; easy, of any shape. Or package.module:function of your own, which is called with data.dir (a
    Path, or None) and returns (train, test) or (train, test, classes): each set a torch Dataset with a length, or a
    pair of arrays (inputs, targets); targets are class numbers, or float values."""
    dir: Path | None = field(default=None, metadata=from_env("DDPJOB_DATA_DIR"))
    """Folder of the data set (not needed for digits, shapes and synthetic)."""
    url: str | None = None
    """shards: where train/ and val/ are in place of data.dir, such as s3://bucket/imagenet or https://host/imagenet; s3
    and gs need s3fs or gcsfs installed. Images are read by byte range."""
    index: Path | None = None
    """shards, imagefolder: folder for the index of all images, which the first start on a node builds, and builds again
    when a shard or a folder has changed. Default: next to local shards, else ~/.cache/ddpjob_trainer. An index next to
    shards on a web server is believed: make it again with them."""
    batch: int = 128
    """Global batch: samples per optimizer step over all ranks together, whatever their number."""
    micro_batches: int = 0
    """Micro-batches per global batch, whatever the number of ranks. Normalization statistics, dropout and mixed images
    belong to one micro-batch, so that any number of ranks computes the same. 0: if the model or the augmentation
    uses any of these, the number of ranks (times train.accumulate) with which the run began; else samples are
    divided evenly among ranks, which computes the same."""
    exact: bool = True
    """What to do if the micro-batches cannot be dealt out evenly among the ranks. true: ranks share micro-batches
    (ddp, fsdp), and a batch normalization exchanges its statistics with those that have the other parts, so that the
    result is that of any other number of ranks. false: each rank's even share is a micro-batch by itself, at full
    speed: each sample is still taken once, and statistics, dropout and mixed images depend on the number of ranks."""
    stretch: float = 1.25
    """Shared micro-batches: samples of a rank in one forward pass, at most, as a multiple of a micro-batch's. 1: never
    more memory than with the ranks at the start, at the cost of more and smaller passes."""
    seed: int = 0
    """Seed of the order, the augmentation and the initial weights. It cannot change at a resume."""
    repeats: int = 1
    """Repeated augmentation (Hoffer et al., 2019; Berman et al., 2019), usually 3 or 4: a global batch holds so many
    differently augmented versions of each of its samples. An epoch is as many steps as without, and takes a part of
    the set: each of its versions once. It cannot change at a resume."""
    augment: bool = True
    """Random shift for digits, crop and flip for CIFAR and shapes, random resized crop and flip for image folders and
    shards. false: none of these, nor RandAugment or TrivialAugment. Data of your own augment themselves."""
    randaugment_ops: int = 0
    """CIFAR, image folders, shards: RandAugment's operations per image (Cubuk et al., 2019), usually 2; 0: none."""
    randaugment_magnitude: int = 9
    """RandAugment's strength, 0 to 30, as torchvision's; timm's is from 0 to 10: three times its number."""
    trivialaugment: bool = False
    """CIFAR, image folders, shards: TrivialAugment, one random operation of random strength per image (Mueller, Hutter,
    2021); not with RandAugment."""
    erase: float = 0.0
    """Random erasing (Zhong et al., 2017): the probability, usually 0.1, that a rectangle of 2 to 33 % of a training
    image becomes the mean colour. Images only."""
    cutout: int = 0
    """Cutout (DeVries and Taylor, 2017): side, usually 16 for CIFAR-10, of a square anywhere in each training image
    that becomes the mean colour; 0: off. Images only."""
    mixup: float = 0.0
    """Mixup's alpha (Zhang et al., 2017), usually 0.2: images of a micro-batch are blended in pairs, and their labels;
    0: off."""
    cutmix: float = 0.0
    """CutMix's alpha (Yun et al., 2019), usually 1: a rectangle comes from another image of the micro-batch; 0: off.
    With mixup as well, each micro-batch gets one of the two, with probability one half."""
    download: bool = False
    """Download CIFAR into data.dir when it is not there (needs internet access)."""
    image_size: int = 224
    """imagefolder, shards: side of the square images that the model sees, in pixels."""
    test_image_size: int = 0
    """imagefolder, shards: side of test images, where a model that takes any size is tested on larger ones than it was
    trained on (Touvron et al., 2019); 0: data.image_size."""
    test_crop: float = 0.875
    """imagefolder, shards: side of a test image as a share of the shorter side that it is the center of."""
    workers: int = 2
    """imagefolder, shards, Datasets of your own: processes per rank that read and decode images, and as many for the
    test set; 0: the training process does."""
    decoder: Decoder = Decoder.AUTO
    """imagefolder, shards: auto: libjpeg-turbo in the workers. dali: NVIDIA DALI in data.workers threads, on the GPU
    where there is one; the same crops, different rounding. Not with RandAugment, and without effect where there are no
    random crops (data.augment=false)."""
    corrupt: Corrupt = Corrupt.SKIP
    """imagefolder, shards: an image that cannot be decoded is named and has weight zero (skip), or ends the training
    (stop). Formats are JPEG, PNG, WebP, BMP, GIF, TIFF and PPM; an image of more than 178,956,970 pixels or 1 GiB is
    not decoded."""
    corrupt_limit: float = 0.01
    """imagefolder, shards: training ends when a larger share of the training images than this could not be decoded in
    an epoch, or of the test images in an evaluation."""
    shape: tuple[int, ...] = (3, 32, 32)
    """synthetic: channels, height, width."""
    classes: int = 10
    """synthetic: number of classes."""
    size: int = 2048
    """synthetic, shapes: number of training images. The test set of synthetic has a quarter of it, that of shapes 2048
    images."""

    @property
    def size_key(self) -> str:
        """The key that sets the size of training images; empty if the data set fixes it."""
        return "data.image_size" if self.name in (DataName.IMAGEFOLDER, DataName.SHARDS) else ""

    @property
    def size_tested(self) -> int:
        """Side of test images if `test_image_size` differs from the training size, otherwise 0."""
        other = self.size_key and self.test_image_size != self.image_size
        return self.test_image_size if other else 0

    def check(self) -> None:
        """Raise ConfigError if the name is neither a data set nor a function."""
        if ":" in self.name or self.name in list(DataName):
            return
        near = difflib.get_close_matches(self.name, [name.value for name in DataName], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"data.name: {self.name!r} is not known; write {', '.join(DataName)} or package.module:function{hint}"
        )


class NormName(enum.StrEnum):
    """Normalization layers."""

    GROUP = "group"
    BATCH = "batch"


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelConfig:
    """The network."""

    name: str = "small_cnn"
    """small_cnn, resnet18_cifar, torchvision:NAME for any classification model of torchvision, such as
    torchvision:resnet50, timm:NAME (pip install timm), or package.module:function of your own, which is called with
    the shape of an image (channels, height, width) and the number of classes, and returns a torch.nn.Module from
    images (n, channels, height, width) to scores (n, classes). Weights of a file: checkpoint.load."""
    width: int = 32
    """small_cnn: channels of the first layer."""
    norm: NormName = NormName.GROUP
    """small_cnn: group normalizes each sample by itself, batch each micro-batch."""
    dropout: float = 0.0
    """small_cnn: dropout probability before the last layer."""
    freeze: tuple[str, ...] = ()
    """Names of parameters (with * and ?) that keep their values, such as features.*, for fine-tuning; strategy=single,
    dp or ddp. Running statistics of batch normalization still move. May change at a resume."""
    zero_init_residual: bool = False
    """ResNets: the last normalization of each block begins at 0, so that the block passes its input on at first (Goyal
    et al., 2017)."""
    drop_path: float = 0.0
    """ResNets: stochastic depth (Huang et al., 2016), usually 0.05: the probability that a sample's residual branch is
    left out in the last block; in the blocks before it rises evenly from 0. 0: off."""
    sync_batchnorm: bool = False
    """Batch normalization with statistics of all ranks' samples together (of the global batch, or of one accumulation
    step of train.accumulate) instead of micro-batches. One more exchange per layer, forward and backward."""
    channels_last: bool = False
    """Memory layout (n, height, width, channels) for images and weights: faster convolutions where tensor cores work
    in float16."""
    compile: bool = False
    """torch.compile: the first steps take a minute or more; the others less time where the device is the limit, and not
    where the host is, as for a small model on a fast GPU. Needs a C++ compiler."""


class OptimizerName(enum.StrEnum):
    """Names of the optimizers."""

    SGD = "sgd"
    ADAMW = "adamw"
    LARS = "lars"
    LAMB = "lamb"


class ScheduleName(enum.StrEnum):
    """Names of the learning rate schedules."""

    COSINE = "cosine"
    STEP = "step"
    ONE_CYCLE = "one_cycle"
    CONSTANT = "constant"


@dataclass(kw_only=True, slots=True, frozen=True)
class OptimConfig:
    """The optimizer and its schedule."""

    name: OptimizerName = OptimizerName.SGD
    """sgd (with momentum), adamw, or for large batches lars (sgd) and lamb (adam), with a learning rate per layer in
    proportion to the norm of its weights."""
    lr: float = 0.1
    """Peak learning rate."""
    momentum: float = 0.9
    """sgd, lars: momentum."""
    nesterov: bool = False
    """sgd: Nesterov momentum."""
    betas: tuple[float, ...] = (0.9, 0.999)
    """adamw, lamb: decay rates of the means of gradients and of their squares."""
    trust_coefficient: float = 0.001
    """lars: length of a step as a share of the weights' norm, at a learning rate of 1."""
    weight_decay: float = 5e-4
    """sgd, lars: L2 penalty; adamw, lamb: decoupled decay."""
    layer_decay: float = 1.0
    """Below 1, such as 0.75: the learning rate of each block of the model is so many times that of the next one, and
    that of the head is optim.lr (BEiT, MAE), for fine-tuning. A model that is not timm's must register its layers from
    the input to the head; the first and the last group are printed. May change at a resume. 1: one rate for all."""
    decay_norm_and_bias: bool = True
    """false: no weight decay for biases and normalization weights (parameters of one dimension), and for the class
    token, position embeddings and biases, and layer scales of transformers and ConvNeXt, as in torchvision's and timm's
    recipes. lars always treats parameters of one dimension as plain sgd does, lamb those without decay as adam does."""
    clip_norm: float = 0.0
    """Largest norm of all gradients together (unscaled); longer ones are scaled down to it. 0: no clipping."""
    loss: str = "cross_entropy"
    """cross_entropy of classes. bce: binary cross entropy of each score by itself, of float targets from 0 to 1 (one or
    several labels), or of classes one against the rest. mse, l1, huber (with a threshold of 1): of float targets. A
    sample's loss is the mean over its values. Or package.module:function of your own, which is called with scores
    (n, ...) in float32 and targets (n, ...), and returns the loss of each sample (n,): the trainer adds them up and
    divides by the global batch."""
    label_smoothing: float = 0.0
    """cross_entropy: share of each label that is spread over all classes."""
    ema_decay: float = 0.0
    """Above 0, such as 0.999: keep an exponential moving average of the weights and evaluate it in their place;
    checkpoints hold both."""
    schedule: ScheduleName = ScheduleName.COSINE
    """cosine: to zero over the whole training; step: times optim.gamma at each of optim.milestones; one_cycle: a rise
    and a longer fall, both as a cosine (torch's OneCycleLR; momentum is not changed); constant."""
    warmup_epochs: float = 0.0
    """Linear rise from zero to optim.lr over this many epochs (fractions allowed). one_cycle has its own."""
    milestones: tuple[float, ...] = (30.0, 60.0, 80.0)
    """step: epochs at which the learning rate falls."""
    gamma: float = 0.1
    """step: factor at each milestone."""
    rise: float = 0.3
    """one_cycle: share of the training in which the learning rate rises."""
    start_factor: float = 0.04
    """one_cycle: the first learning rate as a share of optim.lr."""
    end_factor: float = 4e-6
    """one_cycle: the last learning rate as a share of optim.lr."""


class AmpLevel(enum.StrEnum):
    """Levels of mixed precision, as in NVIDIA's Apex; auto lets the device decide."""

    AUTO = "auto"
    O0 = "O0"
    O1 = "O1"
    O2 = "O2"
    O3 = "O3"


class AmpDtype(enum.StrEnum):
    """Formats of 16-bit numbers."""

    AUTO = "auto"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


@dataclass(kw_only=True, slots=True, frozen=True)
class AmpConfig:
    """Mixed precision."""

    level: AmpLevel = AmpLevel.AUTO
    """auto: O1 in bfloat16 (or the amp.dtype that is given) on NVIDIA and AMD GPUs that compute in it, else O0. Others
    as in Apex. O0: float32. O1: weights are float32, operations that are safe in lower precision run in amp.dtype
    (autocast). O2: the model is in amp.dtype with batch normalization in float32, the optimizer works on a float32
    copy. O3: everything in amp.dtype."""
    dtype: AmpDtype = AmpDtype.AUTO
    """float16, or bfloat16, which has the range of float32 and needs no loss scale; auto: bfloat16 with
    amp.level=auto and on the CPU, else float16, as Apex. O0 does not use it."""
    loss_scale: str = "auto"
    """Factor on losses, by which gradients are divided again, so that small gradients do not vanish in float16: a
    number such as 128.0; dynamic: 65536 at first, halved when a gradient is not finite, doubled after
    amp.scale_window steps in which all were; auto: dynamic for float16 at O1 and O2, else 1, as Apex. A step whose
    gradients are not finite is skipped, whatever the scale."""
    scale_window: int = 2000
    """dynamic: steps without an overflow after which the scale is doubled."""
    tf32: bool = True
    """float32 products on NVIDIA GPUs from Ampere on: TensorFloat-32 (10 bits of mantissa, several times as fast).
    false: all 23 bits."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainConfig:
    """The run as a whole."""

    name: str = "train"
    """Name of the run; its folder is ./runs/NAME when neither train.run_dir nor checkpoint.dir is given."""
    epochs: int = 10
    """Passes over the training set."""
    run_dir: Path | None = None
    """Folder of metrics.jsonl and the ledger; default: CHECKPOINT_DIR/run."""
    backend: str = field(default="auto", metadata=from_env("DDPJOB_BACKEND"))
    """auto, nccl, gloo, hccl, xccl or mpi. auto: the accelerator that is there, else the CPU with gloo."""
    timeout_seconds: float = 600.0
    """Timeout of a collective operation."""
    threads: int = 0
    """CPU threads per rank; 0: an equal share of the cores that the container may use, or one where ddp.ordered
    trains on CPUs, since their sums depend on it."""
    log_every: int = 10
    """Steps between two reports of progress."""
    print_seconds: float = 5.0
    """Shortest time between two lines of progress where the output is not a terminal."""
    eval_every: int = 1
    """Epochs between two evaluations; the last epoch is always evaluated."""
    eval_batch: int = 512
    """Test samples per rank and forward pass."""
    accumulate: int = 1
    """Gradient accumulation steps: a rank computes its share of a global batch in this many parts, which takes less
    memory; gradients are exchanged once for all of them. May change at a resume. Not with data.micro_batches, which
    are such parts."""
    nonfinite_limit: int = 3
    """A step whose loss or gradient is not finite is skipped on all ranks, with a warning; this many in a row end the
    training."""
    ledger: bool = False
    """Record which samples each step took, on each rank; `python -m ddpjob_trainer ledger RUN` checks them, and shows
    the steps that were skipped and the images that could not be read."""


class Format(enum.StrEnum):
    """Formats of a checkpoint on disk."""

    TORCH = "torch"
    DCP = "dcp"


class Metric(enum.StrEnum):
    """The metric by which checkpoints are ranked."""

    ACCURACY = "accuracy"
    LOSS = "loss"


class Interval(enum.StrEnum):
    """An interval that is not a number of seconds."""

    AUTO = "auto"


@dataclass(kw_only=True, slots=True, frozen=True)
class CheckpointConfig:
    """When and where checkpoints are saved. One is always saved at the end of training and at SIGTERM.

    Training continues while a checkpoint is written. A write that fails is reported, and tried again when the next
    checkpoint is due.
    """

    dir: Path | None = field(default=None, metadata=from_env("DDPJOB_CHECKPOINT_DIR"))
    """Folder of checkpoints; default: RUN/checkpoints."""
    shared: bool = field(default=True, metadata=from_env("DDPJOB_CHECKPOINT_SHARED"))
    """true: every node sees the same folder, and rank 0 writes. false: each node has its own; one process of each node
    writes, and a start resumes from the newest checkpoint that any node still has."""
    url: str = field(default="", metadata=from_env("DDPJOB_CHECKPOINT_URL"))
    """s3://BUCKET/PREFIX: copy each checkpoint there while training continues, and resume from the newest complete one
    of it and of checkpoint.dir. In a job storage.checkpoints.url gives each job a folder of its own; a url given here
    is used as it is. Credentials, region and endpoint are AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and
    AWS_ENDPOINT_URL. Needs `pip install obstore`. Empty: none."""
    url_wait_seconds: float = 600.0
    """How long the end of training waits for the last copy in checkpoint.url; with SIGTERM as long as the grace period
    allows. A copy that is missing then is a warning; with checkpoint.shared=false, where the folder is lost with its
    machine, an error."""
    format: Format = Format.TORCH
    """torch: one file that torch.load of any script reads. dcp: a folder of torch.distributed.checkpoint, each rank
    writes its shard; for models that are too large for one rank, and checkpoint.shared=true or checkpoint.url. Either
    can be resumed from."""
    every_steps: int = 0
    """Save every N steps; 0: not by steps."""
    every_seconds: float | Interval = Interval.AUTO
    """Save every N seconds; 0: not by time. auto: as often as it costs at most 1 % of the time,
    between 10 and 300 s. The cost of the last save counts: how long training paused for it, and the
    processor time that writing it took."""
    every_epochs: int = 1
    """Save at the end of every N epochs; 0: not by epochs."""
    keep: int = 3
    """Newest whole checkpoints to keep."""
    keep_best: int = 0
    """Checkpoints with the best evaluation to keep in addition to the newest; 0: none. DIR/best.pt links to the best,
    DIR/best.json names it. train.eval_every must be a multiple of checkpoint.every_epochs."""
    best_by: Metric = Metric.ACCURACY
    """What is best: accuracy (the highest) or loss (the lowest) on the test set."""
    keep_every_epochs: int = 0
    """Keep the checkpoint at the end of every N epochs forever; 0: none."""
    failures: int = 3
    """This many failed writes in a row end the training with an error. At its end and at SIGTERM one is enough."""
    resume: bool = True
    """Resume from the newest whole checkpoint. false: start from scratch, which is refused while the folder holds
    checkpoints."""
    load: Path | None = None
    """Start from the weights of this checkpoint (file or folder; of this trainer, or any state dict that torch.save
    wrote). Only for a new run: when checkpoint.dir holds a checkpoint, training resumes from that."""
    load_average: bool = True
    """checkpoint.load: where the checkpoint holds a moving average of the weights (optim.ema_decay, timm's and
    torchvision's model_ema), start from the average, which the evaluations that chose the best are of. false: from the
    weights themselves."""
    load_except: tuple[str, ...] = ()
    """checkpoint.load: names of tensors (with * and ?) that keep their initial values, such as fc.* for another number
    of classes."""

    def check(self) -> None:
        """Raise ConfigError for values that are out of range or exclude each other."""
        for key, least in (("keep", 1), ("failures", 1), ("every_steps", 0), ("every_epochs", 0)):
            self._at_least(key, least)
        if self.every_seconds is not Interval.AUTO:
            self._at_least("every_seconds", 0)
        for key in ("keep_best", "keep_every_epochs"):
            self._at_least(key, 0)
        if self.load_except and self.load is None:
            raise ConfigError(
                f"checkpoint.load_except={','.join(self.load_except)}: applies to checkpoint.load, which is not set; "
                f"set it, or leave both out"
            )
        if self.format is Format.DCP and not self.shared and not self.url:
            raise ConfigError(
                "checkpoint.format=dcp: each rank writes a shard, and a node's own folder would hold only its own"
                " shards; set checkpoint.shared=true and a folder that every node sees, checkpoint.url (a bucket, which"
                " gets the shards of all nodes), or checkpoint.format=torch"
            )
        if not 0 <= self.url_wait_seconds < 86400:
            raise ConfigError(f"checkpoint.url_wait_seconds={self.url_wait_seconds}: must be from 0 to 86400")
        if self.keep_every_epochs and (self.every_epochs == 0 or self.keep_every_epochs % self.every_epochs):
            raise ConfigError(
                f"checkpoint.keep_every_epochs={self.keep_every_epochs}: must be a multiple of"
                f" checkpoint.every_epochs={self.every_epochs}, which says after which epochs there is a checkpoint"
            )
        if self.keep_best and self.every_epochs == 0:
            raise ConfigError(
                "checkpoint.keep_best: evaluations come at the end of an epoch; set checkpoint.every_epochs to"
                " 1 or more"
            )

    def _at_least(self, key: str, least: int) -> None:
        if getattr(self, key) < least:
            raise ConfigError(f"checkpoint.{key}: {getattr(self, key)} is less than {least}")


class PrKind(enum.StrEnum):
    """The ways to compute precision-recall curves."""

    NONE = "none"
    EXACT = "exact"
    BINNED = "binned"


@dataclass(kw_only=True, slots=True, frozen=True)
class EvalConfig:
    """The numbers that an evaluation reports in addition to loss, top-1, top-5 and MAE."""

    pr: PrKind = PrKind.NONE
    """Precision-recall curve and average precision per class, macro and micro, equal to scikit-learn's. exact: all
    scores are gathered on rank 0, which needs about 35 bytes per test sample and class. binned: 16 bytes per class
    and bin on each rank, whatever the size of the test set; scores in one bin count as equal."""
    pr_bins: int = 2000
    """binned: number of bins, of equal width in log odds. With 2000, average precision is about 0.001 below the exact
    one."""
    confusion: bool = True
    """Confusion matrix, and precision, recall and F1 of each class from it: 8 bytes per pair of classes; not above
    4096 classes."""
    pictures: bool = True
    """Draw curve and matrix as PNG next to the numbers in RUN/eval, in a separate process."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ReportConfig:
    """Where rank 0 reports to, besides RUN/metrics.jsonl and the terminal, and the profile.

    A sink that fails never stops the training.
    """

    tensorboard: bool = False
    """Event files for TensorBoard in RUN/tensorboard (pip install tensorboard)."""
    prometheus_port: int = 0
    """Serve metrics for Prometheus at this port of rank 0, under /metrics (pip install prometheus-client); 0: off."""
    wandb: str = ""
    """Weights & Biases: name of the project; empty: off (pip install wandb). WANDB_MODE, WANDB_API_KEY and
    WANDB_ENTITY work as usual."""
    mlflow: str = ""
    """MLflow: URI of the tracking server or store, such as http://host:5000 or sqlite:///mlflow.db; empty: off (pip
    install mlflow)."""
    mlflow_experiment: str = "ddpjob"
    """MLflow: name of the experiment."""
    straggler_factor: float = 1.5
    """Name a rank that lags: whose own work of a step (waiting for data, forward and backward pass, without waiting for
    others) takes this many times the median rank's. strategy=ddp, fsdp and pipeline; 0: off."""
    straggler_seconds: float = 30.0
    """How long a rank must lag to be named, and keep up to be named no longer."""
    peak_flops: float = 0.0
    """FLOP/s of a device in the format that is computed in, against which the share that is used (MFU) is reported; 0:
    by the GPU's name, and no MFU where that is not known."""
    profile_steps: tuple[int, ...] = ()
    """torch.profiler for COUNT steps from step START on, written [START, COUNT]: a trace of each rank for
    chrome://tracing or Perfetto, and a table of the operators that take most time, in RUN/profile. Step START - 1
    warms the profiler up; COUNT steps are kept in memory."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PreflightConfig:
    """Whether machines are checked before training, and against which limits.

    `python -m ddpjob_trainer preflight` runs the same checks.
    """

    run: bool = False
    """Check before training; a check that fails ends the run."""
    join_seconds: float = 30.0
    """How long to wait for ranks; those that have not come by then are named."""
    step_seconds: float = 10.0
    """How long a single check may take; one without an answer by then fails."""
    clock_skew_seconds: float = 1.0
    """Warn of clocks further apart: lines of different nodes' logs cannot be put in order. NTP holds 0.01 s."""
    free_gb: float = 1.0
    """Warn of less free space in the checkpoint folder; twice the largest checkpoint in it counts if that is more."""
    bandwidth_gbs: float = 0.0
    """Warn of a slower all-reduce (bus bandwidth in GB/s) between several nodes; 0: it is only shown."""


class CommHook(enum.StrEnum):
    """Names of PyTorch's communication hooks for DDP."""

    NONE = "none"
    FP16 = "fp16"
    BF16 = "bf16"
    POWERSGD = "powersgd"


@dataclass(kw_only=True, slots=True, frozen=True)
class DdpConfig:
    """strategy=ddp."""

    ordered: bool = False
    """Add gradients up in the order of the micro-batches, whichever rank has them (needs data.micro_batches above 0):
    weights are then the same to the bit on any number of ranks. Costs an all-gather of data.micro_batches gradients
    instead of one all-reduce."""
    comm_hook: CommHook = CommHook.NONE
    """What ranks send: none, whole gradients; fp16, bf16, gradients of half the length; powersgd, products of two
    narrow matrices (Vogels et al. 2019; the error is added to the next step's gradients). Results then depend on
    the number of ranks, by rounding or, with powersgd, more. powersgd's error memory is not in checkpoints: a
    restart begins without."""
    powersgd_rank: int = 1
    """powersgd: columns of the matrices. More columns approximate better and take longer to send."""
    powersgd_start: int = 1000
    """powersgd: first step, after each start of the ranks, that is compressed."""


@dataclass(kw_only=True, slots=True, frozen=True)
class FsdpConfig:
    """strategy=fsdp."""

    reshard: bool = True
    """Free a block's weights after its forward pass, and gather them again for the backward pass: less memory, half as
    much traffic again."""


class PipelineSchedule(enum.StrEnum):
    """Names of the orders of forward and backward passes."""

    GPIPE = "gpipe"
    ONE_FORWARD_ONE_BACKWARD = "1f1b"


@dataclass(kw_only=True, slots=True, frozen=True)
class PipelineConfig:
    """strategy=pipeline."""

    stages: int = 0
    """Stages of the model, each on a rank of its own; the number of ranks is a multiple of it. 0: as many as there are
    ranks."""
    schedule: PipelineSchedule = PipelineSchedule.ONE_FORWARD_ONE_BACKWARD
    """gpipe: all micro-batches forward, then all backward. 1f1b: backward as soon as possible, which needs less
    memory; same as gpipe when there are fewer micro-batches than stages."""
    micro_batches: int = 4
    """Micro-batches into which each replica divides its share of a global batch; data.micro_batches, where it is
    given, is their number over all replicas."""


@dataclass(kw_only=True, slots=True, frozen=True)
class DdpMpConfig:
    """strategy=ddp_mp."""

    devices: int = 2
    """Devices of each process, and parts of the model. On the CPU all parts are on the one device."""


class CompressionName(enum.StrEnum):
    """Names of Horovod's compressions."""

    NONE = "none"
    FP16 = "fp16"


@dataclass(kw_only=True, slots=True, frozen=True)
class HorovodConfig:
    """strategy=horovod."""

    compression: CompressionName = CompressionName.NONE
    """none, or fp16: gradients are sent and added up in half precision."""


@dataclass(kw_only=True, slots=True, frozen=True)
class DeepSpeedConfig:
    """strategy=deepspeed."""

    stage: int = 1
    """ZeRO: 0 shards nothing, 1 the optimizer's state, 2 gradients too, 3 weights too."""
    config: Path | None = None
    """More settings of DeepSpeed, a JSON file. Keys that the trainer decides (batch, precision, optimizer, schedule,
    clipping) are ignored; a line of output names them."""
