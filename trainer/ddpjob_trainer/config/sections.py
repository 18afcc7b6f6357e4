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
    """What happens if an image cannot be decoded."""

    SKIP = "skip"
    STOP = "stop"


class Flip(enum.StrEnum):
    """Values of data.flip that are neither true nor false."""

    ALTERNATING = "alternating"


class Padding(enum.StrEnum):
    """How to fill the border that becomes empty when an image is shifted."""

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
    shards`. shapes: ten classes of generated 16x16 colour images, which are the same on any machine
    and hard enough to compare recipes. synthetic: generated images of any size (data.shape), which
    are easy to learn. package.module:function: your own function, which is called with data.dir (a
    Path, or None) and returns (train, test) or (train, test, classes). Each of train and test is a
    torch Dataset with a length, or a pair of arrays (inputs, targets); targets are class numbers or
    float values.
    """
    dir: Path | None = field(default=None, metadata=from_env("DDPJOB_DATA_DIR"))
    """Folder of the data set (not needed for digits, shapes and synthetic)."""
    url: str | None = None
    """shards: URL of the data set, used instead of data.dir, such as s3://bucket/imagenet or
    https://host/imagenet. s3 needs the package s3fs, and gs needs gcsfs. Each image is read by its
    byte range, so shards are not downloaded as a whole.
    """
    index: Path | None = None
    """shards, imagefolder: folder in which the index of all images is stored. A run builds the
    index if it does not exist, or if a shard or an image folder has changed. Default: for shards on
    this machine, the folder of the shards if it is writable; otherwise ~/.cache/ddpjob_trainer. An
    index next to shards on a web server is used without comparing it with the shards, so rebuild it
    whenever these shards change.
    """
    batch: int = 128
    """Global batch: number of samples that all ranks together process in an optimizer step. It
    stays the same if the number of ranks changes.
    """
    micro_batches: int = 0
    """Number of micro-batches in a global batch, regardless of the number of ranks. Batch
    normalization statistics, dropout and mixing (data.mixup, data.cutmix) are computed within one
    micro-batch, so the result is the same on any number of ranks. 0: if the run uses any of these,
    data.batch_transform, ddp.ordered or your own model, the number of micro-batches is fixed when
    the run first starts. It is then the number of ranks that the job requests (outside a job, the
    number of ranks), times train.accumulate. In other runs, there are no fixed micro-batches:
    samples are divided evenly among ranks, which does not change the result either.
    """
    exact: bool = True
    """What happens if the micro-batches of a step cannot be distributed evenly among ranks. true:
    several ranks compute parts of the same micro-batch (strategy=ddp or fsdp), and exchange their
    batch normalization statistics, so that the result does not depend on the number of ranks.
    false: each rank takes an even share of the samples, and processes it in as few forward passes
    as data.stretch allows. Each sample is still taken once, but normalization statistics, dropout
    and mixed images then depend on the number of ranks.
    """
    stretch: float = 0
    """Maximum number of samples that a rank processes in one forward pass, as a multiple of the
    size of a micro-batch. 0: 1.25 with data.exact=true, and 1.5 with data.exact=false. 1: at most
    one micro-batch, which needs the least memory but more forward passes.
    """
    seed: int = 0
    """Seed for the order of the samples, their augmentation, and the initial weights. It cannot
    change when a run resumes.
    """
    repeats: int = 1
    """Repeated augmentation (Hoffer et al., 2019; Berman et al., 2019): number of differently
    augmented versions of each sample in a global batch, usually 3 or 4. The number of steps per
    epoch stays the same, so an epoch covers only a part of the training set. The key cannot change
    when a run resumes.
    """
    augment: bool = True
    """true: augment training images at random. Digits are shifted, images of CIFAR and shapes are
    cropped and flipped, and images of image folders and shards are cropped, resized and flipped.
    false: none of these, and neither RandAugment nor TrivialAugment. For your own data set, augment
    the samples in your code, or set data.shift and data.flip.
    """
    shift: int = 0
    """CIFAR, digits, shapes, your own uint8 images: maximum number of pixels by which a training
    image is shifted at random. 0: 4 for CIFAR, 2 for shapes, 1 for digits, and no shift for your
    own images.
    """
    padding: Padding = Padding.ZEROS
    """How to fill the border that becomes empty when an image is shifted. zeros: with zeros.
    reflect: with the pixels of the image itself, mirrored.
    """
    flip: bool | Flip = False
    """true: in each epoch, mirror half of your own uint8 training images, chosen at random.
    alternating (also possible for CIFAR and shapes): choose once for each image whether it is
    mirrored in the first epoch, and then mirror it in every other epoch.
    """
    mean: tuple[float, ...] = ()
    """Your own uint8 images: mean of each channel, on a scale from 0 to 1. It is subtracted from
    the pixels on the device. Default: ImageNet's means for 3 channels, otherwise 0.5.
    """
    std: tuple[float, ...] = ()
    """Your own uint8 images: standard deviation of each channel, by which the pixels are divided
    after data.mean is subtracted. Default: ImageNet's deviations for 3 channels, otherwise 0.5.
    """
    batch_transform: str = ""
    """package.module:function: your own transform of training batches, which is called on the
    device with (images, labels, generator) for each micro-batch and returns (images, labels). The
    result is the same on any number of ranks. Labels may become class probabilities (n, classes).
    With this key, ranks do not share micro-batches. It may change when a run resumes.
    """
    randaugment_ops: int = 0
    """CIFAR, image folders, shards: number of operations that RandAugment applies to each image
    (Cubuk et al., 2019), usually 2; 0: no RandAugment.
    """
    randaugment_magnitude: int = 9
    """Strength of RandAugment's operations, from 0 to 30 as in torchvision. In timm, the strength
    is from 0 to 10, so multiply a value from timm by three.
    """
    trivialaugment: bool = False
    """CIFAR, image folders, shards: apply TrivialAugment, which is one random operation of random
    strength per image (Mueller and Hutter, 2021). It cannot be combined with RandAugment.
    """
    erase: float = 0.0
    """Random erasing (Zhong et al., 2017): probability that a rectangle of a training image is
    replaced with the mean colour, usually 0.1. The rectangle covers 2 to 33 % of the image. Only
    for images.
    """
    cutout: int = 0
    """Cutout (DeVries and Taylor, 2017): side, in pixels, of a square in each training image that
    is replaced with the mean colour, usually 16 for CIFAR-10; 0: off. Only for images.
    """
    mixup: float = 0.0
    """Alpha, the parameter of Mixup (Zhang et al., 2017), usually 0.2. The images of a micro-batch
    are blended in pairs, together with their labels. 0: off.
    """
    cutmix: float = 0.0
    """Alpha, the parameter of CutMix (Yun et al., 2019), usually 1. A rectangle of each image is
    replaced with the same rectangle of a different image in the micro-batch. 0: off. If data.mixup
    is also set, each micro-batch uses one of the two methods, chosen at random.
    """
    download: bool = False
    """Download CIFAR into data.dir if it is missing (needs internet access)."""
    image_size: int = 224
    """imagefolder, shards: side of the square images that the model sees, in pixels."""
    early_sizes: tuple[str, ...] = ()
    """imagefolder, shards: smaller sides of training images in early epochs, for speed (progressive
    resizing). Each entry is SIDE:EPOCHS. For example, 128:6,160:12 means 128 pixels until the end
    of epoch 6, then 160 pixels until the end of epoch 12, and then data.image_size. May change when
    a run resumes.
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
    """imagefolder, shards, your own Datasets: number of processes per rank that read and decode
    training images. The same number of additional processes reads and decodes the test set. 0: the
    training process reads and decodes all images.
    """
    decoder: Decoder = Decoder.AUTO
    """imagefolder, shards: decoder of the training images. auto: libjpeg-turbo, in the worker
    processes. dali: NVIDIA DALI, in data.workers threads, and on the GPU if there is one. The crops
    are the same, but the pixels are rounded differently. dali cannot be combined with RandAugment,
    and has no effect without random crops (data.augment=false).
    """
    corrupt: Corrupt = Corrupt.SKIP
    """imagefolder, shards: what happens if an image cannot be decoded. skip: the image is reported,
    and has weight zero. stop: the training ends. Images can be JPEG, PNG, WebP, BMP, GIF, TIFF and
    PPM. Images above 178,956,970 pixels or 1 GiB are not decoded.
    """
    corrupt_limit: float = 0.01
    """imagefolder, shards: maximum share of images that cannot be decoded. Training ends with an
    error if the share is larger among an epoch's training images or an evaluation's test images.
    """
    shape: tuple[int, ...] = (3, 32, 32)
    """synthetic: channels, height, width."""
    classes: int = 10
    """synthetic: number of classes."""
    size: int = 2048
    """synthetic, shapes: number of training images. The test set of synthetic has a quarter of that
    number, and the test set of shapes always has 2048 images.
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
    """Values of model.channels_last that are neither true nor false."""

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
    """Weights from which a new run starts. For torchvision:NAME and timm:NAME: default, or the name
    of weights in that library, such as IMAGENET1K_V1. Rank 0 downloads them. For any model: a file
    or folder with a state dict (torch.save, safetensors). If the last layer has a different shape,
    it keeps its initial values; all other tensors must have the same shape.
    """
    width: int = 32
    """small_cnn: number of channels of the first layer; airbench_cifar: number of channels of the
    first group.
    """
    norm: NormName = NormName.GROUP
    """small_cnn: type of the normalization layers. group: group normalization, which normalizes
    each sample separately. batch: batch normalization, which normalizes each micro-batch.
    """
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
    """Stochastic depth for ResNets (Huang et al., 2016). This is the probability that a sample skips
    the residual branch of the last block, usually 0.05. From the first block to the last, the probability rises
    linearly from 0 to this value. 0: off.
    """
    sync_batchnorm: bool = False
    """Compute batch normalization statistics over the samples of all ranks, instead of over each
    micro-batch. These are the samples of a global batch or, with train.accumulate, of one
    accumulation step. Each such layer exchanges data between ranks once in the forward pass and
    once in the backward pass.
    """
    channels_last: bool | MemoryLayout = MemoryLayout.AUTO
    """Store images and weights in the order (n, height, width, channels), which makes convolutions
    faster on tensor cores in float16. auto: true for images on a GPU that computes in 16 bits,
    except for your own model.
    """
    compile: bool | CompileMode = False
    """Whether to use torch.compile, or the name of one of its modes. true: the mode default. The
    first steps take a minute or more. reduce-overhead replays CUDA graphs, which helps if the GPU
    has to wait for the CPU, as with a small model on a fast GPU. Needs a C++ compiler.
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
    """Peak learning rate. The schedule (optim.schedule) multiplies it by a factor."""
    momentum: float = 0.9
    """sgd, lars: momentum. muon: momentum of the parameters that muon updates as sgd does."""
    nesterov: bool = False
    """sgd: Nesterov momentum."""
    betas: tuple[float, ...] = (0.9, 0.999)
    """adamw, lamb: decay rates of the moving averages of gradients and of their squares."""
    trust_coefficient: float = 0.001
    """lars: norm of a layer's update relative to the norm of the layer's weights, at a learning
    rate of 1.
    """
    muon_momentum: float = 0.95
    """muon: Nesterov momentum of matrices and convolutions."""
    muon_steps: int = 5
    """muon: number of Newton-Schulz iterations per update. They run in float32 with amp.level=O0,
    otherwise in bfloat16.
    """
    muon_except: tuple[str, ...] = ()
    """muon: names of matrices (with * and ?) that muon updates as sgd does. These are usually the
    last layer and embeddings, such as head.*.
    """
    muon_fixed_norm: bool = False
    """muon: before each update, scale each matrix to a norm of sqrt(rows). This replaces weight
    decay.
    """
    weight_decay: float = 5e-4
    """Strength of weight decay. sgd, lars: an L2 penalty. adamw, lamb: decoupled decay. muon:
    decoupled decay for matrices, and an L2 penalty for other parameters.
    """
    groups: tuple[str, ...] = ()
    """Learning rates of some parameters. An entry is PATTERN=RATE, or PATTERN=RATE/DECAY to also
    set the weight decay of these parameters, such as head.*=10,*.bias=2/0. PATTERN matches the
    names of parameters (with * and ?). If several patterns match, the first one applies. RATE is a
    factor by which the schedule's learning rate is multiplied. May change when a run resumes.
    """
    layer_decay: float = 1.0
    """Learning rates that fall from the head to the input, for fine-tuning (BEiT, MAE). The head's
    learning rate is optim.lr. Each block's learning rate is that of the next block, multiplied by
    this factor, such as 0.75. A model that is not from timm must register its layers in the order
    from the input to the head; the log names the first and last groups, so that you can check the
    order. May change when a run resumes. 1: the same learning rate for all blocks.
    """
    decay_norm_and_bias: bool = True
    """true: weight decay applies to all parameters. false: exclude the parameters that
    torchvision's and timm's recipes exclude: biases, normalization weights (parameters of one
    dimension), class tokens, position embeddings, position biases, and layer scales of transformers
    and ConvNeXt. With either value, lars updates parameters of one dimension as plain sgd does, and
    lamb updates parameters without weight decay as adam does.
    """
    clip_norm: float = 0.0
    """Maximum norm of the gradient of all parameters, after the loss scale has been removed. A
    gradient with a larger norm is scaled down to this norm. 0: no clipping.
    """
    loss: str = "cross_entropy"
    """cross_entropy: for classes. bce: binary cross entropy of each score separately, for float
    targets from 0 to 1 (one or several labels), or for classes (one against the rest). mse, l1,
    huber (with a threshold of 1): for float targets. If a sample has several values, its loss is
    their mean. package.module:function: your own function, which is called with scores (n, ...) in
    float32 and targets (n, ...), and returns the loss of each sample (n,). The trainer adds up the
    losses of all samples, and divides the sum by the global batch.
    """
    label_smoothing: float = 0.0
    """cross_entropy: share of each label that is distributed evenly over all classes."""
    ema_decay: float = 0.0
    """Above 0, such as 0.999: keep an exponential moving average of the weights with this decay
    rate. Evaluations then use the average instead of the weights. Checkpoints contain both.
    """
    schedule: ScheduleName | str = ScheduleName.COSINE
    """How the learning rate changes. cosine, linear: it falls to zero by the end of training, along
    a cosine or a straight line. step: it is multiplied by optim.gamma at each of optim.milestones.
    one_cycle: it rises, and then falls for a longer time, both along a cosine (torch's OneCycleLR;
    momentum stays the same). constant: it stays the same. package.module:function: your own
    function, which is called with (epoch, train.epochs), where epoch is 2.5 in the middle of the
    third epoch, and returns a factor of optim.lr.
    """
    warmup_epochs: float = 0.0
    """Number of epochs (fractions allowed) over which the learning rate rises linearly from zero to
    optim.lr. Not for one_cycle, which has its own warm-up.
    """
    milestones: tuple[float, ...] = (30.0, 60.0, 80.0)
    """step: epochs at which the learning rate is multiplied by optim.gamma."""
    gamma: float = 0.1
    """step: factor by which the learning rate is multiplied at each of optim.milestones."""
    rise: float = 0.3
    """one_cycle: share of the whole training during which the learning rate rises."""
    start_factor: float = 0.04
    """one_cycle: learning rate at the start of training, as a share of optim.lr."""
    end_factor: float = 4e-6
    """one_cycle: learning rate at the end of training, as a share of optim.lr."""

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
    """The 16-bit data type: float16, or bfloat16, which has the range of float32 and therefore does
    not need a loss scale. auto: bfloat16 with amp.level=auto or on the CPU, otherwise float16, as
    in Apex. With amp.level=O0, this key has no effect.
    """
    loss_scale: str = "auto"
    """Losses are multiplied by this factor, and gradients are divided by it afterwards, so that
    small gradients do not vanish in float16. A number, such as 128.0: a fixed factor. dynamic:
    65536 at first; it is halved if a gradient is not finite, and doubled after amp.scale_window
    steps in which all gradients are finite. auto: dynamic for float16 at O1 and O2, otherwise 1, as
    in Apex. A step whose gradients are not finite is always skipped.
    """
    scale_window: int = 2000
    """amp.loss_scale=dynamic: number of steps without an overflow after which the scale is doubled.
    """
    tf32: bool = True
    """Compute float32 products in TensorFloat-32 on NVIDIA GPUs since Ampere (a mantissa of 10
    bits, several times as fast). false: use all 23 bits.
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
    """Folder of metrics.jsonl and the ledger, which other keys call RUN. Default:
    CHECKPOINT_DIR/run if checkpoint.dir is set, otherwise ./runs/NAME.
    """
    backend: str = field(default="auto", metadata=from_env("DDPJOB_BACKEND"))
    """Backend for communication between ranks: auto, nccl, gloo, hccl, xccl or mpi. auto: the
    backend of the available accelerator; without an accelerator, the CPU with gloo.
    """
    timeout_seconds: float = 600.0
    """Timeout of a collective operation between ranks, in seconds."""
    threads: int = 0
    """Number of CPU threads per rank. 0: an equal share of the cores that the container may use.
    With ddp.ordered on CPUs, 0 means one thread, because sums on CPUs depend on the number of
    threads. If OMP_NUM_THREADS is set to a number other than 1, 0 keeps that number of threads.
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
    """Number of test samples that a rank processes in one forward pass."""
    accumulate: int = 1
    """Gradient accumulation: number of parts into which a rank divides its share of a global batch.
    Processing one part after another saves memory. Gradients are exchanged only once for all parts.
    May change when a run resumes. Cannot be combined with data.micro_batches, which already divides
    the batch.
    """
    callbacks: tuple[str, ...] = ()
    """Your own objects, each as package.module:name, which is called without arguments. Their
    methods compute metrics, end the training early, or do anything else between steps. May change
    when a run resumes.
    """
    nonfinite_limit: int = 3
    """A step whose loss or gradient is not finite is skipped on all ranks, with a warning. Training
    ends with an error after this number of consecutive skipped steps.
    """
    ledger: bool = False
    """Record on each rank which samples were taken in each step. `python -m ddpjob_trainer ledger
    RUN` checks these records, and shows skipped steps and unreadable images.
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
    """Values of checkpoint.every_seconds that are not a number."""

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
    """true: all nodes see the same folder, and only rank 0 writes to it. false: each node has its
    own folder, and one process of each node writes to it. A run resumes from the newest checkpoint
    that any of the nodes still has.
    """
    url: str = field(default="", metadata=from_env("DDPJOB_CHECKPOINT_URL"))
    """s3://BUCKET/PREFIX to which each checkpoint is copied while training continues. A run resumes
    from the newest complete checkpoint in this bucket or in checkpoint.dir. In a job,
    storage.checkpoints.url gives each job its own folder, but a URL in this key is used unchanged.
    Credentials, region and endpoint come from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION
    and AWS_ENDPOINT_URL. Needs `pip install obstore`. Empty: no copies.
    """
    url_wait_seconds: float = 600.0
    """Maximum number of seconds to wait at the end of training until the last checkpoint has been
    copied to checkpoint.url. On SIGTERM, the limit is the rest of the grace period. If the copy is
    not complete by then, a warning is printed. With checkpoint.shared=false, the run fails instead,
    because the local folder is lost together with its machine.
    """
    format: Format = Format.TORCH
    """torch: a single file that any script can read with torch.load. dcp: a folder in the format of
    torch.distributed.checkpoint, into which each rank writes its shard. It is meant for models that
    are too large for one rank, and needs checkpoint.shared=true or checkpoint.url. A run can resume
    from either format.
    """
    every_steps: int = 0
    """Save every N steps; 0: do not save by steps."""
    every_seconds: float | Interval = Interval.AUTO
    """Save every N seconds; 0: do not save by time. auto: choose the interval so that saving costs
    at most 1 % of the training time, but not below 10 s and not above 300 s. The cost is measured
    at the last save. It is the time for which training paused, plus the CPU time of writing.
    """
    every_epochs: int = 1
    """Save at the end of every N epochs; 0: do not save by epochs."""
    keep: int = 3
    """Number of the newest intact checkpoints to keep."""
    keep_best: int = 0
    """Number of checkpoints to keep because their evaluations are the best, in addition to the
    newest checkpoints; 0: none. In the checkpoint folder, best.pt links to the best checkpoint, and
    best.json names it. train.eval_every must be a multiple of checkpoint.every_epochs.
    """
    best_by: Metric = Metric.ACCURACY
    """Metric on the test set that determines the best checkpoint: accuracy (the highest is the
    best) or loss (the lowest is the best).
    """
    keep_every_epochs: int = 0
    """Keep the checkpoint from the end of every Nth epoch forever; 0: none."""
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
    """checkpoint.load: if the checkpoint contains a moving average of the weights (optim.ema_decay,
    or model_ema in timm and torchvision), start from this average. The evaluations that chose the
    best checkpoint used it too. false: start from the weights themselves.
    """
    load_except: tuple[str, ...] = ()
    """checkpoint.load: names of tensors (with * and ?) that are not loaded and keep their initial
    values, such as fc.* if the number of classes is different.
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
                f"checkpoint.load_except={','.join(self.load_except)} has no effect without checkpoint.load; set "
                "checkpoint.load, or leave out checkpoint.load_except"
            )
        if self.format is Format.DCP and not self.shared and not self.url:
            raise ConfigError(
                "checkpoint.format=dcp needs storage that holds the shards of all nodes; set checkpoint.shared=true "
                "and a folder that every node sees, checkpoint.url (a bucket), or checkpoint.format=torch"
            )
        if not 0 <= self.url_wait_seconds < 86400:
            raise ConfigError(
                f"checkpoint.url_wait_seconds={self.url_wait_seconds}: must be at least 0 and below 86400 (one day)"
            )
        if self.keep_every_epochs and (self.every_epochs == 0 or self.keep_every_epochs % self.every_epochs):
            raise ConfigError(
                f"checkpoint.keep_every_epochs={self.keep_every_epochs}: must be a multiple of "
                f"checkpoint.every_epochs={self.every_epochs}, which selects the epochs to save"
            )
        if self.keep_best and self.every_epochs == 0:
            raise ConfigError(
                "checkpoint.keep_best needs checkpoints at the end of epochs, because evaluations "
                "run there; set checkpoint.every_epochs to 1 or more"
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
    """Test-time augmentation: average the scores of a test image over several versions of it.
    mirror: the image and its mirror image. mirror_translate: the image and its mirror image get
    half of the weight. The other half goes to four shifted versions: both images, moved by one
    pixel up and left, and by one pixel down and right.
    """
    pr: PrKind = PrKind.NONE
    """Compute a precision-recall curve and the average precision for each class, and their macro
    and micro averages, as in scikit-learn. exact: all scores are gathered on rank 0, which needs
    about 35 bytes per test sample and class. binned: scores are counted in bins, and scores in the
    same bin count as equal. This needs 16 bytes per class and bin on each rank, regardless of the
    size of the test set.
    """
    pr_bins: int = 2000
    """eval.pr=binned: number of bins, which have equal width in log odds. With 2000 bins, the
    average precision differs from the exact value by about 0.001.
    """
    confusion: bool = True
    """Report the confusion matrix, and the precision, recall and F1 of each class. The matrix takes
    8 bytes per pair of classes, and is omitted if there are more than 4096 classes.
    """
    pictures: bool = True
    """Draw the precision-recall curves (eval.pr) and the confusion matrix as PNG files in RUN/eval,
    next to the files with their numbers. A separate process draws them.
    """


@dataclass(kw_only=True, slots=True, frozen=True)
class ReportConfig:
    """Stragglers, the profile, and where rank 0's reports go in addition to RUN/metrics.jsonl and
    the terminal.

    If one of these destinations (a sink) fails, training continues without it.
    """

    tensorboard: bool = False
    """Write event files for TensorBoard to RUN/tensorboard (pip install tensorboard)."""
    prometheus_port: int = 0
    """Port on which rank 0 serves metrics for Prometheus under /metrics (pip install
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
    """Report a rank as a straggler if its own work takes this many times as long per step as that
    of the median rank. A rank's own work includes the forward and backward pass and waiting for
    data, but not waiting for other ranks. Only for strategy=ddp, fsdp and pipeline. 0: off.
    """
    straggler_seconds: float = 30.0
    """Number of seconds for which a rank must be slow before it is reported as a straggler. The
    report ends once the rank has not been slow for the same number of seconds.
    """
    peak_flops: float = 0.0
    """Peak FLOP/s of a device in the dtype in which it computes. The share of this peak that
    training achieves is reported as MFU. 0: use the known peak of the GPU, which is found by its
    name. If the peak is unknown, MFU is not reported.
    """
    profile_steps: tuple[int, ...] = ()
    """[START, COUNT]: run torch.profiler for COUNT steps, beginning with step START. It writes a
    trace of each rank for chrome://tracing or Perfetto, and a table of the most expensive
    operators, to RUN/profile. The profiler warms up in step START - 1. It keeps the records of all
    COUNT steps in memory until it writes them.
    """


@dataclass(kw_only=True, slots=True, frozen=True)
class PreflightConfig:
    """Whether machines are checked before training, and the limits of these checks.

    `python -m ddpjob_trainer preflight` runs the same checks.
    """

    run: bool = False
    """Run the checks before training. A failed check ends the run."""
    join_seconds: float = 30.0
    """Number of seconds to wait until all ranks have started the checks. Ranks that are still
    missing then are reported by name.
    """
    step_seconds: float = 10.0
    """Timeout of a single check, in seconds. A check that has no result by then fails."""
    clock_skew_seconds: float = 1.0
    """Warn if the clocks of two nodes differ by more than this number of seconds, because logs of
    different nodes then cannot be put in order. NTP achieves 0.01 s.
    """
    free_gb: float = 1.0
    """Warn if the file system of the checkpoint folder has less free space than this number of GB,
    or less than twice the size of the largest checkpoint in the folder.
    """
    bandwidth_gbs: float = 0.0
    """Warn if the bandwidth of an all-reduce between several nodes is lower than this (bus
    bandwidth in GB/s); 0: only show the bandwidth.
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
    """Add up the gradients of micro-batches in the order of the micro-batches, regardless of the
    ranks that computed them. Weights then have identical bits on any number of ranks, if the number
    of micro-batches is the same (see data.micro_batches). Instead of one all-reduce, each step
    needs an all-gather of the gradients of all micro-batches.
    """
    comm_hook: CommHook = CommHook.NONE
    """The form in which ranks send gradients to each other. none: unchanged. fp16, bf16: as 16-bit
    numbers. powersgd: as products of two narrow matrices (Vogels et al., 2019). The error of this
    approximation is added to the gradients of the next step. With fp16 and bf16, results depend
    slightly on the number of ranks because of rounding; with powersgd, they depend on it more
    strongly. Checkpoints do not include the error that powersgd remembers, so a restart loses it.
    """
    powersgd_rank: int = 1
    """powersgd: number of columns of the matrices. More columns approximate better but take longer
    to send.
    """
    powersgd_start: int = 1000
    """powersgd: number of steps after each start of the ranks during which gradients are sent
    uncompressed.
    """


@dataclass(kw_only=True, slots=True, frozen=True)
class FsdpConfig:
    """strategy=fsdp."""

    reshard: bool = True
    """Free a block's weights after its forward pass, and gather them again for the backward pass.
    This saves memory, but increases the traffic between ranks by half.
    """
    short_gathers: bool = False
    """Gather weights in 16 bits instead of float32 if amp.level is O1, which halves the traffic of
    gathering. Each rank keeps its shard in float32, and gradients are added up in float32.
    Normalization layers stay in float32. No effect with other values of amp.level.
    """
    recompute: bool = False
    """Free the activations inside a block after its forward pass, and compute them again in the
    backward pass (activation checkpointing). This saves memory, but adds a third of the work. Each
    micro-batch is then computed by a single rank, unless data.exact is false.
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
    """Order of the forward and backward passes of micro-batches. gpipe: all forward passes, then
    all backward passes. 1f1b: each backward pass as soon as possible, which needs less memory. If
    there are fewer micro-batches than stages, 1f1b is the same as gpipe.
    """
    micro_batches: int = 4
    """Number of micro-batches into which each replica divides its share of a global batch. If
    data.micro_batches is set, this key has no effect, because that key divides the whole global
    batch.
    """


@dataclass(kw_only=True, slots=True, frozen=True)
class DdpMpConfig:
    """strategy=ddp_mp."""

    devices: int = 2
    """Number of devices per process. The model is split into the same number of parts, one part per
    device. On the CPU, all parts are on the same device.
    """


class CompressionName(enum.StrEnum):
    """Names of Horovod's compressions."""

    NONE = "none"
    FP16 = "fp16"


@dataclass(kw_only=True, slots=True, frozen=True)
class HorovodConfig:
    """strategy=horovod."""

    compression: CompressionName = CompressionName.NONE
    """Compression of gradients. none: send gradients unchanged. fp16: send and add up gradients in
    half precision.
    """


@dataclass(kw_only=True, slots=True, frozen=True)
class DeepSpeedConfig:
    """strategy=deepspeed."""

    stage: int = 1
    """ZeRO stage. 0: nothing is sharded. 1: the optimizer's state is sharded. 2: gradients too. 3:
    weights too.
    """
    config: Path | None = None
    """JSON file with additional settings for DeepSpeed. Settings that the trainer controls (batch,
    precision, optimizer, schedule, clipping) are ignored, and the output names them.
    """
