"""Every section of the configuration: frozen dataclasses whose fields are keys.

The string below a field is its help text. Sections do not import any implementation, so any module
can import them. Values are checked by the modules that use them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path

from ddpjob_trainer.config.loader import check_name, from_env
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
    """How to handle an image that cannot be decoded."""

    SKIP = "skip"
    STOP = "stop"


class Flip(enum.StrEnum):
    """A rule for mirroring images, other than a new random draw in each epoch."""

    ALTERNATING = "alternating"


class Padding(enum.StrEnum):
    """Pixels of the border that a shift moves into an image."""

    ZEROS = "zeros"
    REFLECT = "reflect"


class Decoder(enum.StrEnum):
    """Decoders of training images."""

    AUTO = "auto"
    DALI = "dali"


@dataclass(kw_only=True, slots=True, frozen=True)
class DataConfig:
    """The data set, and how its samples are distributed among ranks."""

    name: str = "digits"
    """digits: 1797 real images of 8x8 pixels that ship with scikit-learn. cifar10, cifar100: the
    folders from the official archives; prefer the binary version, which does not contain pickles.
    imagefolder: train/ and val/ with one folder of images per class. shards: train/ and val/ with
    tar files of KEY.jpg and KEY.cls (WebDataset's layout), as written by `python -m ddpjob_trainer
    shards`. shapes: ten classes of generated 16x16 colour images, the same on any machine and hard
    enough to compare recipes. synthetic: generated images of any shape, easy to learn.
    package.module:function: your own function, which is called with data.dir (a Path, or None) and
    returns (train, test) or (train, test, classes). Each set is a torch Dataset with a length, or a
    pair of arrays (inputs, targets); targets are class numbers or float values.
    """
    dir: Path | None = field(default=None, metadata=from_env("DDPJOB_DATA_DIR"))
    """Folder of the data set (not needed for digits, shapes and synthetic)."""
    url: str | None = None
    """shards: URL to use instead of data.dir, such as s3://bucket/imagenet or
    https://host/imagenet; s3 and gs need s3fs or gcsfs installed. Images are read by byte range.
    """
    index: Path | None = None
    """shards, imagefolder: folder for the index of all images. It is built when a run
    starts, and rebuilt after a shard or folder has changed. Default: next to local shards,
    otherwise ~/.cache/ddpjob_trainer. An index next to shards on a web server is trusted, so
    rebuild it whenever these shards change.
    """
    batch: int = 128
    """Global batch: samples per optimizer step over all ranks together. It does not change with the
    number of ranks.
    """
    micro_batches: int = 0
    """Micro-batches per global batch, regardless of the number of ranks. Normalization statistics,
    dropout and mixing (data.mixup, data.cutmix) stay within a micro-batch, so any number of ranks
    computes the same result. 0: if the model or the augmentation uses any of these, one micro-batch
    per initial rank (times train.accumulate). Otherwise samples are divided evenly among ranks,
    which does not change the result either.
    """
    exact: bool = True
    """How to proceed if micro-batches cannot be divided evenly among ranks. true: ranks share
    micro-batches (ddp, fsdp) and exchange batch normalization statistics, so that the result does
    not depend on the number of ranks. false: each rank takes an even share of the samples in as few
    passes as data.stretch allows. Each sample is still taken once, but statistics, dropout and
    mixed images depend on the number of ranks.
    """
    stretch: float = 0
    """Maximum number of samples in a rank's forward pass, as a multiple of a micro-batch. 0: 1.25, or
    1.5 with data.exact=false. 1: take at most one micro-batch per pass, which needs the least
    memory but more passes.
    """
    seed: int = 0
    """Seed of the order, the augmentation and the initial weights. It cannot change when a run
    resumes.
    """
    repeats: int = 1
    """Repeated augmentation (Hoffer et al., 2019; Berman et al., 2019), usually 3 or 4: number of
    differently augmented versions of each sample in a global batch. The number of steps per epoch
    stays the same, so an epoch takes only a part of the set. It cannot change when a run resumes.
    """
    augment: bool = True
    """Random shift for digits, crop and flip for CIFAR and shapes, random resized crop and flip for
    image folders and shards. false: none of these, and neither RandAugment nor TrivialAugment. For
    your own data set, augment the samples in your code, or set data.shift and data.flip.
    """
    shift: int = 0
    """CIFAR, digits, shapes, your own uint8 images: shift training images by up to this number of
    pixels at random. 0: 4 for CIFAR, 2 for shapes, 1 for digits, no shift for your own images.
    """
    padding: Padding = Padding.ZEROS
    """The border that a shift moves into an image. reflect: the image's own pixels, mirrored."""
    flip: bool | Flip = False
    """true: mirror half of your own uint8 training images at random in each epoch. alternating
    (also CIFAR and shapes): draw only once for each image, and mirror it in every other epoch.
    """
    mean: tuple[float, ...] = ()
    """Your own uint8 images: mean of each channel, from 0 to 1, which is subtracted on the device.
    Default: ImageNet's means for 3 channels, otherwise 0.5.
    """
    std: tuple[float, ...] = ()
    """Your own uint8 images: standard deviation of each channel. After data.mean is subtracted,
    pixels are divided by it. Default: ImageNet's deviations for 3 channels, otherwise 0.5.
    """
    batch_transform: str = ""
    """package.module:function: your own transform of training batches, which is called on the
    device with (images, labels, generator) for each micro-batch and returns (images, labels). The
    result is the same on any number of ranks. Labels may become class probabilities (n, classes).
    With this key, ranks do not share micro-batches. It may change when a run resumes.
    """
    randaugment_ops: int = 0
    """CIFAR, image folders, shards: RandAugment's operations per image (Cubuk et al., 2019),
    usually 2; 0: none.
    """
    randaugment_magnitude: int = 9
    """RandAugment's strength, 0 to 30, as in torchvision. timm's scale is 0 to 10, so multiply its
    value by three.
    """
    trivialaugment: bool = False
    """CIFAR, image folders, shards: TrivialAugment, one random operation of random strength per
    image (Mueller, Hutter, 2021). Cannot be combined with RandAugment.
    """
    erase: float = 0.0
    """Random erasing (Zhong et al., 2017): probability that a rectangle of 2 to 33 % of a training
    image is replaced with the mean colour, usually 0.1. Images only.
    """
    cutout: int = 0
    """Cutout (DeVries and Taylor, 2017): side of a square in each training image that is replaced
    with the mean colour, usually 16 for CIFAR-10; 0: off. Images only.
    """
    mixup: float = 0.0
    """Mixup's alpha (Zhang et al., 2017), usually 0.2. Images of a micro-batch are blended in
    pairs, together with their labels; 0: off.
    """
    cutmix: float = 0.0
    """CutMix's alpha (Yun et al., 2019), usually 1. A rectangle is replaced with that of another
    image in the micro-batch; 0: off. If data.mixup is also set, each micro-batch uses one of the
    two at random.
    """
    download: bool = False
    """Download CIFAR into data.dir if it is missing (needs internet access)."""
    image_size: int = 224
    """imagefolder, shards: side of the square images that the model sees, in pixels."""
    early_sizes: tuple[str, ...] = ()
    """imagefolder, shards: smaller sides of training images in early epochs, for speed (progressive
    resizing). SIDE:EPOCHS, such as 128:6,160:12, means 128 pixels in the first 6 epochs, then 160
    until the 12th epoch ends, and then data.image_size. May change when a run resumes.
    """
    test_image_size: int = 0
    """imagefolder, shards: side of test images, for models that accept any size and are tested on
    larger images than in training (Touvron et al., 2019); 0: data.image_size.
    """
    test_crop: float = 0.875
    """imagefolder, shards: side of the square that is cut from the center of a test image, as a
    share of the image's shorter side.
    """
    workers: int = 2
    """imagefolder, shards, your own Datasets: processes per rank that read and decode images, plus
    the same number for the test set; 0: use the training process.
    """
    decoder: Decoder = Decoder.AUTO
    """imagefolder, shards: auto: libjpeg-turbo in the workers. dali: NVIDIA DALI in data.workers
    threads, on the GPU if there is one, with the same crops but different rounding. dali cannot be
    combined with RandAugment, and has no effect without random crops (data.augment=false).
    """
    corrupt: Corrupt = Corrupt.SKIP
    """imagefolder, shards: an image that cannot be decoded is reported and has weight zero (skip),
    or ends the training (stop). Formats are JPEG, PNG, WebP, BMP, GIF, TIFF and PPM. Images above
    178,956,970 pixels or 1 GiB are not decoded.
    """
    corrupt_limit: float = 0.01
    """imagefolder, shards: training ends if a larger share than this of an epoch's training images,
    or of an evaluation's test images, cannot be decoded.
    """
    shape: tuple[int, ...] = (3, 32, 32)
    """synthetic: channels, height, width."""
    classes: int = 10
    """synthetic: number of classes."""
    size: int = 2048
    """synthetic, shapes: number of training images. The test set of synthetic has a quarter of that
    number; the test set of shapes has 2048 images.
    """

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
        check_name("data.name", self.name, list(DataName))


class NormName(enum.StrEnum):
    """Normalization layers."""

    GROUP = "group"
    BATCH = "batch"


class MemoryLayout(enum.StrEnum):
    """A memory layout that depends on the device."""

    AUTO = "auto"


class CompileMode(enum.StrEnum):
    """Modes of torch.compile."""

    DEFAULT = "default"
    REDUCE_OVERHEAD = "reduce-overhead"
    MAX_AUTOTUNE = "max-autotune"


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelConfig:
    """The network."""

    name: str = "small_cnn"
    """small_cnn, resnet18_cifar, airbench_cifar (a small network whose first layer is computed from
    the training images; Jordan, 2024), torchvision:NAME for any classification model of torchvision
    (such as torchvision:resnet50), timm:NAME (pip install timm), or your own
    package.module:function. The function is called with the shape of an image (channels, height,
    width) and the number of classes, and returns a torch.nn.Module that maps images (n, channels,
    height, width) to scores (n, classes). To start from trained weights, set model.pretrained or
    checkpoint.load.
    """
    pretrained: str = ""
    """Weights to start from in a new run. torchvision:NAME, timm:NAME: default, or a name of the
    library's weights such as IMAGENET1K_V1, which rank 0 downloads. Any model: a file or folder
    with a state dict (torch.save, safetensors). The last layer keeps its initial values if its shape
    differs; all other tensors must fit.
    """
    width: int = 32
    """small_cnn: channels of the first layer; airbench_cifar: channels of the first group."""
    norm: NormName = NormName.GROUP
    """small_cnn: group normalizes each sample separately, batch each micro-batch."""
    dropout: float = 0.0
    """small_cnn: dropout probability before the last layer."""
    freeze: tuple[str, ...] = ()
    """Names of parameters (with * and ?) that keep their values, such as features.*, for
    fine-tuning (strategy=single, dp or ddp). Running statistics of batch normalization are still
    updated. The key may change when a run resumes.
    """
    zero_init_residual: bool = False
    """ResNets: initialize the last normalization of each block to 0, so that the block is the
    identity at first (Goyal et al., 2017).
    """
    drop_path: float = 0.0
    """ResNets: stochastic depth (Huang et al., 2016), usually 0.05: the probability that the last
    block's residual branch is dropped for a sample. The probability rises linearly from 0 over the
    preceding blocks. 0: off.
    """
    sync_batchnorm: bool = False
    """Compute batch normalization statistics over all ranks' samples (the global batch, or one
    accumulation step of train.accumulate) instead of micro-batches. This adds one exchange per
    layer to the forward pass and one to the backward pass.
    """
    channels_last: bool | MemoryLayout = MemoryLayout.AUTO
    """Memory layout (n, height, width, channels) for images and weights, which makes convolutions
    faster on tensor cores in float16. auto: true for images on a GPU that computes in 16 bits,
    except for your own model.
    """
    compile: bool | CompileMode = False
    """torch.compile, or one of its modes; true: default. The first steps take a minute or more.
    reduce-overhead replays CUDA graphs, which helps if the host is the bottleneck, as with a small
    model on a fast GPU. Needs a C++ compiler.
    """


class OptimizerName(enum.StrEnum):
    """Names of the optimizers."""

    SGD = "sgd"
    ADAMW = "adamw"
    LARS = "lars"
    LAMB = "lamb"
    MUON = "muon"


class ScheduleName(enum.StrEnum):
    """Names of the learning rate schedules."""

    COSINE = "cosine"
    LINEAR = "linear"
    STEP = "step"
    ONE_CYCLE = "one_cycle"
    CONSTANT = "constant"


@dataclass(kw_only=True, slots=True, frozen=True)
class OptimConfig:
    """The optimizer and its schedule."""

    name: OptimizerName | str = OptimizerName.SGD
    """sgd (with momentum) or adamw; for large batches, lars (based on sgd) or lamb (based on adam),
    which scale each layer's learning rate by the norm of its weights. muon (Jordan et al., 2024)
    orthogonalizes the updates of matrices and convolutions, and updates other parameters as sgd
    does with Nesterov momentum. package.module:name: your own class or function, such as
    torch.optim:RMSprop, which is called with (groups, lr=optim.lr, weight_decay=optim.weight_decay)
    and returns a torch.optim.Optimizer. The optimizer cannot change when a run resumes.
    """
    lr: float = 0.1
    """Peak learning rate."""
    momentum: float = 0.9
    """sgd, lars: momentum; muon: momentum of the parameters that it updates as sgd does."""
    nesterov: bool = False
    """sgd: Nesterov momentum."""
    betas: tuple[float, ...] = (0.9, 0.999)
    """adamw, lamb: decay rates of the moving averages of gradients and of their squares."""
    trust_coefficient: float = 0.001
    """lars: length of a step as a share of the weights' norm, at a learning rate of 1."""
    muon_momentum: float = 0.95
    """muon: Nesterov momentum of matrices and convolutions."""
    muon_steps: int = 5
    """muon: Newton-Schulz iterations per update. They run in float32 with amp.level=O0, otherwise
    in bfloat16.
    """
    muon_except: tuple[str, ...] = ()
    """muon: names of matrices (with * and ?) to update as sgd does, usually the last layer and
    embeddings, such as head.*.
    """
    muon_fixed_norm: bool = False
    """muon: before each update, scale a matrix to the norm sqrt(rows). Replaces weight decay."""
    weight_decay: float = 5e-4
    """sgd, lars: L2 penalty; adamw, lamb: decoupled decay; muon: decoupled for matrices, otherwise
    an L2 penalty.
    """
    groups: tuple[str, ...] = ()
    """Learning rates of some parameters: PATTERN=RATE, or PATTERN=RATE/DECAY to also set their
    weight decay, such as head.*=10,*.bias=2/0. PATTERN matches names (with * and ?), and the first
    match counts. RATE is a factor of the schedule's learning rate. May change when a run resumes.
    """
    layer_decay: float = 1.0
    """Below 1, such as 0.75: a block's learning rate is this factor times the next block's, for
    fine-tuning. The head's rate is optim.lr (BEiT, MAE). A model that is not from timm must
    register its layers from the input to the head; the first and last groups are printed. May
    change when a run resumes. 1: the same rate for all.
    """
    decay_norm_and_bias: bool = True
    """false: exclude some parameters from weight decay, as in torchvision's and timm's recipes:
    biases, normalization weights (parameters of one dimension), class tokens, position embeddings
    and biases, and layer scales of transformers and ConvNeXt. lars always treats parameters of one
    dimension as plain sgd does, and lamb treats those without decay as adam does.
    """
    clip_norm: float = 0.0
    """Maximum norm of all gradients together, without the loss scale. Larger gradients are scaled
    down to this norm. 0: no clipping.
    """
    loss: str = "cross_entropy"
    """cross_entropy: classes. bce: binary cross entropy of each score separately, for float targets
    from 0 to 1 (one or several labels), or for classes (one against the rest). mse, l1, huber (with
    a threshold of 1): float targets. A sample's loss is the mean over its values.
    package.module:function: your own function, which is called with scores (n, ...) in float32 and
    targets (n, ...), and returns the loss of each sample (n,). The trainer adds these up and
    divides by the global batch.
    """
    label_smoothing: float = 0.0
    """cross_entropy: share of each label that is spread over all classes."""
    ema_decay: float = 0.0
    """Above 0, such as 0.999: keep an exponential moving average of the weights, and evaluate it
    instead of the weights. Checkpoints contain both.
    """
    schedule: ScheduleName | str = ScheduleName.COSINE
    """cosine, linear: to zero over the whole training. step: multiply by optim.gamma at each of
    optim.milestones. one_cycle: a rise and a longer fall, both along a cosine (torch's OneCycleLR;
    momentum stays the same). constant: no change. package.module:function: your own function, which
    is called with (epoch, train.epochs), where epoch is 2.5 in the middle of the third epoch, and
    returns a factor of optim.lr.
    """
    warmup_epochs: float = 0.0
    """Number of epochs (fractions allowed) over which the learning rate rises linearly from zero to
    optim.lr. Not for one_cycle, which has its own warm-up.
    """
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

    def check(self) -> None:
        """Raise ConfigError if a name is neither built in nor a function."""
        check_name("optim.name", self.name, list(OptimizerName))
        check_name("optim.schedule", self.schedule, list(ScheduleName))


class AmpLevel(enum.StrEnum):
    """Levels of mixed precision, as in NVIDIA's Apex; auto lets the device decide."""

    AUTO = "auto"
    O0 = "O0"
    O1 = "O1"
    O2 = "O2"
    O3 = "O3"


class AmpDtype(enum.StrEnum):
    """Data types with 16 bits."""

    AUTO = "auto"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


@dataclass(kw_only=True, slots=True, frozen=True)
class AmpConfig:
    """Mixed precision."""

    level: AmpLevel = AmpLevel.AUTO
    """auto: O1 in bfloat16 (or in amp.dtype, if set) on NVIDIA and AMD GPUs that support it,
    otherwise O0. The other levels are the same as in Apex. O0: float32. O1: float32 weights;
    operations that are safe in lower precision run in amp.dtype (autocast). O2: the model is in
    amp.dtype except for batch normalization, and the optimizer works on a float32 copy. O3:
    everything is in amp.dtype.
    """
    dtype: AmpDtype = AmpDtype.AUTO
    """float16, or bfloat16, which has the range of float32 and does not need a loss scale. auto:
    bfloat16 with amp.level=auto and on the CPU, otherwise float16, as in Apex. O0 ignores it.
    """
    loss_scale: str = "auto"
    """Losses are multiplied by this factor, and gradients are divided by it afterwards, so that
    small gradients do not vanish in float16. A number, such as 128.0: a fixed factor. dynamic:
    65536 at first; it is halved if a gradient is not finite, and doubled after amp.scale_window
    steps in which all gradients are finite. auto: dynamic for float16 at O1 and O2, otherwise 1, as
    in Apex. A step whose gradients are not finite is always skipped.
    """
    scale_window: int = 2000
    """dynamic: number of steps without an overflow after which the scale is doubled."""
    tf32: bool = True
    """Compute float32 products in TensorFloat-32 on NVIDIA GPUs since Ampere (10 bits of mantissa,
    several times as fast). false: use all 23 bits.
    """


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainConfig:
    """The run as a whole."""

    name: str = "train"
    """Name of the run. Its folder is ./runs/NAME if neither train.run_dir nor checkpoint.dir is
    set.
    """
    epochs: int = 10
    """Number of passes over the training set."""
    run_dir: Path | None = None
    """Folder of metrics.jsonl and the ledger; default: CHECKPOINT_DIR/run."""
    backend: str = field(default="auto", metadata=from_env("DDPJOB_BACKEND"))
    """auto, nccl, gloo, hccl, xccl or mpi. auto: the available accelerator, otherwise the CPU with
    gloo.
    """
    timeout_seconds: float = 600.0
    """Timeout of a collective operation."""
    threads: int = 0
    """CPU threads per rank. 0: an equal share of the cores that the container may use, or one if
    ddp.ordered trains on CPUs, because sums there depend on the number of threads.
    """
    log_every: int = 10
    """Number of steps between two progress reports."""
    print_seconds: float = 5.0
    """Minimum number of seconds between two progress lines if the output is not a terminal."""
    eval_every: int = 1
    """Number of epochs between two evaluations. The last epoch is always evaluated. 0: never
    evaluate, not even the last epoch.
    """
    eval_batch: int = 512
    """Number of test samples per rank and forward pass."""
    accumulate: int = 1
    """Gradient accumulation steps: the number of parts in which a rank computes its share of a
    global batch, to save memory. Gradients are exchanged once for all parts. May change when a run
    resumes. Cannot be combined with data.micro_batches, which already divides the batch.
    """
    callbacks: tuple[str, ...] = ()
    """Your own objects, each as package.module:name, which is called without arguments. Their
    methods compute metrics, end the training early, or do anything else between steps. May change
    when a run resumes.
    """
    nonfinite_limit: int = 3
    """Number of consecutive skipped steps after which training ends. A step whose loss or gradient
    is not finite is skipped on all ranks, with a warning.
    """
    ledger: bool = False
    """Record on each rank which samples each step took. `python -m ddpjob_trainer ledger RUN`
    checks the records, and shows skipped steps and unreadable images.
    """


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
    """When and where checkpoints are saved. A checkpoint is always saved at the end of training and
    on SIGTERM.

    Training continues while a checkpoint is written. A failed write is reported, and retried when
    the next checkpoint is due.
    """

    dir: Path | None = field(default=None, metadata=from_env("DDPJOB_CHECKPOINT_DIR"))
    """Folder of checkpoints; default: RUN/checkpoints."""
    shared: bool = field(default=True, metadata=from_env("DDPJOB_CHECKPOINT_SHARED"))
    """true: all nodes see the same folder, and rank 0 writes. false: each node has its own folder,
    to which one of its processes writes. A run resumes from the newest checkpoint that any node
    still has.
    """
    url: str = field(default="", metadata=from_env("DDPJOB_CHECKPOINT_URL"))
    """s3://BUCKET/PREFIX to which each checkpoint is copied while training continues. A run
    resumes from the newest complete checkpoint in this bucket or in checkpoint.dir. In a job,
    storage.checkpoints.url gives each job its own folder, but a URL set here is used unchanged.
    Credentials, region and endpoint come from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION
    and AWS_ENDPOINT_URL. Needs `pip install obstore`. Empty: no copies.
    """
    url_wait_seconds: float = 600.0
    """How long to wait at the end of training until the last copy has reached checkpoint.url. On
    SIGTERM, the limit is what remains of the grace period. A missing copy causes a warning or, with
    checkpoint.shared=false, an error, because the folder is lost with its machine.
    """
    format: Format = Format.TORCH
    """torch: a single file that any script can read with torch.load. dcp: a folder of
    torch.distributed.checkpoint, into which each rank writes its shard, for models that are too
    large for one rank; needs checkpoint.shared=true or checkpoint.url. A run can resume from either
    format.
    """
    every_steps: int = 0
    """Save every N steps; 0: not by steps."""
    every_seconds: float | Interval = Interval.AUTO
    """Save every N seconds; 0: not by time. auto: as often as possible at a cost of at most 1 % of
    the time, but every 10 to 300 s. The cost is measured on the last save: how long training
    paused, plus the CPU time of writing.
    """
    every_epochs: int = 1
    """Save at the end of every N epochs; 0: not by epochs."""
    keep: int = 3
    """Number of the newest intact checkpoints to keep."""
    keep_best: int = 0
    """Number of checkpoints with the best evaluations to keep in addition to the newest ones; 0:
    none. DIR/best.pt links to the best one, and DIR/best.json names it. train.eval_every must be a
    multiple of checkpoint.every_epochs.
    """
    best_by: Metric = Metric.ACCURACY
    """Metric of the best checkpoint: accuracy (the highest) or loss (the lowest) on the test set.
    """
    keep_every_epochs: int = 0
    """Keep the checkpoint at the end of every N epochs forever; 0: none."""
    failures: int = 3
    """Number of consecutive failed writes after which training ends with an error. At the end of
    training and on SIGTERM, a single failure is enough.
    """
    resume: bool = True
    """Resume from the newest intact checkpoint. false: start from scratch, which is refused if the
    folder contains checkpoints.
    """
    load: Path | None = None
    """Checkpoint with the weights to start from: a file or folder from this trainer, or any state
    dict written by torch.save. Applies only to a new run; if checkpoint.dir contains a checkpoint,
    training resumes from that checkpoint.
    """
    load_average: bool = True
    """checkpoint.load: start from the moving average of the weights, if the checkpoint has one
    (optim.ema_decay, model_ema in timm and torchvision). The evaluations that chose the best
    checkpoint used the average. false: start from the weights themselves.
    """
    load_except: tuple[str, ...] = ()
    """checkpoint.load: names of tensors (with * and ?) that keep their initial values, such as fc.*
    for a different number of classes.
    """

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
                f"checkpoint.load_except={','.join(self.load_except)} has no effect without checkpoint.load;"
                " set that too, or leave both out"
            )
        if self.format is Format.DCP and not self.shared and not self.url:
            raise ConfigError(
                "checkpoint.format=dcp needs storage that holds the shards of all nodes; set checkpoint.shared=true "
                "and a folder that every node sees, checkpoint.url (a bucket), or checkpoint.format=torch"
            )
        if not 0 <= self.url_wait_seconds < 86400:
            raise ConfigError(f"checkpoint.url_wait_seconds={self.url_wait_seconds}: must be from 0 to 86400")
        if self.keep_every_epochs and (self.every_epochs == 0 or self.keep_every_epochs % self.every_epochs):
            raise ConfigError(
                f"checkpoint.keep_every_epochs={self.keep_every_epochs}: must be a multiple of"
                f" checkpoint.every_epochs={self.every_epochs}, which determines the epochs with a checkpoint"
            )
        if self.keep_best and self.every_epochs == 0:
            raise ConfigError(
                "checkpoint.keep_best: evaluations take place only at the end of an epoch; set"
                " checkpoint.every_epochs to"
                " 1 or more"
            )

    def _at_least(self, key: str, least: int) -> None:
        if getattr(self, key) < least:
            raise ConfigError(f"checkpoint.{key}={getattr(self, key)}: must be at least {least}")


class Views(enum.StrEnum):
    """The versions of a test image whose scores are averaged."""

    NONE = "none"
    MIRROR = "mirror"
    MIRROR_TRANSLATE = "mirror_translate"


class PrKind(enum.StrEnum):
    """The ways to compute precision-recall curves."""

    NONE = "none"
    EXACT = "exact"
    BINNED = "binned"


@dataclass(kw_only=True, slots=True, frozen=True)
class EvalConfig:
    """The numbers that an evaluation reports in addition to loss, top-1, top-5 and MAE."""

    tta: Views = Views.NONE
    """Test-time augmentation: average a test image's scores over several versions of it. mirror:
    the image and its mirror image. mirror_translate: half of the weight goes to these two, and half
    to both of them shifted by a pixel up and left, and down and right.
    """
    pr: PrKind = PrKind.NONE
    """Precision-recall curve and average precision per class, macro and micro, as in scikit-learn.
    exact: all scores are gathered on rank 0, which needs about 35 bytes per test sample and class.
    binned: 16 bytes per class and bin on each rank, regardless of the test set's size; scores in
    the same bin count as equal.
    """
    pr_bins: int = 2000
    """binned: number of bins, of equal width in log odds. With 2000 bins, average precision differs
    from the exact value by about 0.001.
    """
    confusion: bool = True
    """Report the confusion matrix, and precision, recall and F1 of each class. It takes 8 bytes per
    pair of classes, and is omitted above 4096 classes.
    """
    pictures: bool = True
    """Draw the curves (eval.pr) and the confusion matrix as PNG files next to the numbers in
    RUN/eval. A separate process does this.
    """


@dataclass(kw_only=True, slots=True, frozen=True)
class ReportConfig:
    """Stragglers, the profile, and where rank 0's reports go in addition to RUN/metrics.jsonl and
    the terminal.

    A sink that fails never stops the training.
    """

    tensorboard: bool = False
    """Write event files for TensorBoard to RUN/tensorboard (pip install tensorboard)."""
    prometheus_port: int = 0
    """Port of rank 0 that serves metrics for Prometheus under /metrics (pip install
    prometheus-client); 0: off.
    """
    wandb: str = ""
    """Weights & Biases: name of the project; empty: off (pip install wandb). WANDB_MODE,
    WANDB_API_KEY and WANDB_ENTITY work as usual.
    """
    mlflow: str = ""
    """MLflow: URI of the tracking server or store, such as http://host:5000 or sqlite:///mlflow.db;
    empty: off (pip install mlflow).
    """
    mlflow_experiment: str = "ddpjob"
    """MLflow: name of the experiment."""
    straggler_factor: float = 1.5
    """Report a rank as a straggler if it works this many times as long per step as the median rank
    (waiting for data, forward and backward pass, but not waiting for others). strategy=ddp, fsdp
    and pipeline; 0: off.
    """
    straggler_seconds: float = 30.0
    """Number of seconds for which a rank must lag to be reported as a straggler. After the same time
    without a lag, the report ends.
    """
    peak_flops: float = 0.0
    """Peak FLOP/s of a device in the dtype in which it computes. The share that training uses is
    reported as MFU. 0: look up the GPU's name; if its peak is unknown, MFU is not reported.
    """
    profile_steps: tuple[int, ...] = ()
    """[START, COUNT]: run torch.profiler for COUNT steps from step START on. It writes a trace of
    each rank for chrome://tracing or Perfetto, and a table of the most expensive operators, to
    RUN/profile. Step START - 1 warms up the profiler. COUNT steps are kept in memory.
    """


@dataclass(kw_only=True, slots=True, frozen=True)
class PreflightConfig:
    """Whether machines are checked before training, and the limits of these checks.

    `python -m ddpjob_trainer preflight` runs the same checks.
    """

    run: bool = False
    """Run the checks before training. A failed check ends the run."""
    join_seconds: float = 30.0
    """How long to wait for ranks. Missing ranks are then reported by name."""
    step_seconds: float = 10.0
    """Timeout of a single check. A check without a result by then fails."""
    clock_skew_seconds: float = 1.0
    """Warn if clocks differ by more than this, because logs of different nodes then cannot be put in
    order. NTP achieves 0.01 s.
    """
    free_gb: float = 1.0
    """Warn if the checkpoint folder has less free space than this, or than twice its largest
    checkpoint.
    """
    bandwidth_gbs: float = 0.0
    """Warn if an all-reduce between several nodes is slower than this (bus bandwidth in GB/s); 0:
    only show the bandwidth.
    """


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
    """Add up gradients in micro-batch order, regardless of the ranks that computed them (needs
    data.micro_batches above 0). Weights then have identical bits on any number of ranks. This costs
    an all-gather of data.micro_batches gradients instead of one all-reduce.
    """
    comm_hook: CommHook = CommHook.NONE
    """The form in which ranks send gradients. none: unchanged. fp16, bf16: as 16-bit numbers.
    powersgd: as products of two narrow matrices (Vogels et al., 2019), whose error is added to the
    next step's gradients. Results then depend on the number of ranks: slightly
    because of rounding, and more strongly with powersgd. Checkpoints do not include powersgd's
    error memory, so a restart loses it.
    """
    powersgd_rank: int = 1
    """powersgd: number of columns of the matrices. More columns approximate better but take longer
    to send.
    """
    powersgd_start: int = 1000
    """powersgd: number of uncompressed steps after each start of the ranks."""


@dataclass(kw_only=True, slots=True, frozen=True)
class FsdpConfig:
    """strategy=fsdp."""

    reshard: bool = True
    """Free a block's weights after its forward pass, and gather them again for the backward pass.
    This saves memory but adds half as much traffic again.
    """
    short_gathers: bool = False
    """Gather weights in the 16 bits of amp.level=O1 instead of float32, which halves this traffic.
    Each rank keeps its shard in float32, and gradients are added up in float32. Normalization
    layers stay in float32. No effect at other levels.
    """
    recompute: bool = False
    """Free activations inside a block after its forward pass, and compute them again in the
    backward pass (activation checkpointing). This saves memory, but adds a third of the work. Ranks
    take whole micro-batches unless data.exact is false.
    """


class PipelineSchedule(enum.StrEnum):
    """Names of the schedules for forward and backward passes."""

    GPIPE = "gpipe"
    ONE_FORWARD_ONE_BACKWARD = "1f1b"


@dataclass(kw_only=True, slots=True, frozen=True)
class PipelineConfig:
    """strategy=pipeline."""

    stages: int = 0
    """Number of stages of the model, each on its own rank. The number of ranks must be a multiple
    of this number. 0: one stage per rank.
    """
    schedule: PipelineSchedule = PipelineSchedule.ONE_FORWARD_ONE_BACKWARD
    """gpipe: all forward passes, then all backward passes. 1f1b: backward passes as soon as
    possible, which needs less memory; the same as gpipe if there are fewer micro-batches than
    stages.
    """
    micro_batches: int = 4
    """Number of micro-batches into which each replica divides its share of a global batch. This key
    has no effect if data.micro_batches is set, which divides the whole global batch.
    """


@dataclass(kw_only=True, slots=True, frozen=True)
class DdpMpConfig:
    """strategy=ddp_mp."""

    devices: int = 2
    """Number of devices per process. The model is split into as many parts, one per device. On the
    CPU, all parts are on the same device.
    """


class CompressionName(enum.StrEnum):
    """Names of Horovod's compressions."""

    NONE = "none"
    FP16 = "fp16"


@dataclass(kw_only=True, slots=True, frozen=True)
class HorovodConfig:
    """strategy=horovod."""

    compression: CompressionName = CompressionName.NONE
    """none, or fp16: send and add up gradients in half precision."""


@dataclass(kw_only=True, slots=True, frozen=True)
class DeepSpeedConfig:
    """strategy=deepspeed."""

    stage: int = 1
    """ZeRO stage: 0 shards nothing, 1 the optimizer's state, 2 also gradients, 3 also weights."""
    config: Path | None = None
    """JSON file with more settings for DeepSpeed. Keys that the trainer controls (batch,
    precision, optimizer, schedule, clipping) are ignored, and reported in the output.
    """
