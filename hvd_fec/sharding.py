"""Index shards that keep the distribution of the whole: class proportions, means and variances.

Each worker trains on one shard. Random shards differ from the whole and from each other by
sampling noise, and so do the gradients computed from them. The functions here deal the samples
so that this difference is as small as whole samples allow:

- :func:`stratified_shard` for labels, regression targets and per-sample statistics;
- :func:`random_shard` and :func:`contiguous_shard`, the usual ways, to compare with;
- :func:`shard_report` measures how far any shards are from the whole;
- :func:`image_features`, :func:`directory_labels` and :func:`file_shard` for common data sets.

Every rank calls the same function with the same arguments but its own ``rank``. Nothing is sent:
all ranks derive the same deal from ``(seed, epoch)`` and take their part of it. For that they
need equal labels and features, in the same order, and the same version of NumPy. All shards
have the same length, so no rank runs out of batches before another.

The result is plain indices. With arrays, ``x[indices], y[indices]``; with ``tf.data``::

    indices = stratified_shard(labels, hvd.rank(), hvd.size(), epoch=epoch, batch_size=64)
    data = tf.data.Dataset.from_tensor_slices(indices).map(load_sample).batch(64)

A later ``shuffle`` (in Keras, ``fit(shuffle=True)`` is the default) does no harm to the shard but
undoes the order that ``batch_size`` asks for.

The aim, that each worker's part has the proportions, mean and variance of the whole, is Neyman's
representative method of stratified sampling ("On the two different aspects of the representative
method", 1934) put to work on data-parallel training.
"""

import heapq
import operator
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, List, Optional, Sequence, Tuple, Union

import numpy as np
from numpy.typing import ArrayLike

__all__ = [
    "ShardReport",
    "contiguous_shard",
    "directory_labels",
    "file_shard",
    "image_features",
    "random_shard",
    "shard_report",
    "stratified_shard",
]

_SWAP_ROUNDS = 1000
_SWAP_VALUES = 1 << 22  # statistics held for swaps: bounds the memory, 8 bytes each
_ROUND_VALUES = 1 << 13  # samples looked at in one round: bounds the time
_CHUNK_VALUES = 1 << 22  # pixels that image_features converts at a time


def stratified_shard(
    labels: ArrayLike,
    rank: int,
    size: int,
    *,
    features: Optional[ArrayLike] = None,
    seed: int = 0,
    epoch: int = 0,
    drop_last: bool = True,
    batch_size: Optional[int] = None,
) -> np.ndarray:
    """Indices of the samples for ``rank``: a shard with the distribution of the whole.

    For every class, the shard's count differs from ``class count / size`` by at most one sample
    (by less than one where ``size`` divides ``N``). Samples of one class are exchangeable, so
    ``features`` can be balanced at the same time: they are dealt from small groups with nearly
    the same value in the first feature, and then a few samples are swapped between shards until
    means and variances of all features agree. Classes with fewer than ``size`` samples are left
    out of that, as most shards have one sample of them at most.

    Another ``epoch`` deals other samples to the shard and puts them in another order.

    Args:
        labels: ``(N,)`` integers, strings or bools are classes. ``(N,)`` floats are regression
            targets: not classes but a feature, put before the other ones, so that each shard
            gets one of every ``size`` neighbours in the order of the targets. None: no labels.
        rank: which shard, ``0 <= rank < size``.
        size: number of shards, at most ``N``.
        features: ``(N,)`` or ``(N, F)`` statistics of each sample, for instance from
            :func:`image_features`. Put the most telling one first.
        seed: the same on every rank.
        epoch: the same on every rank.
        drop_last: True leaves out ``N % size`` samples, taken from the largest classes, others
            in each epoch. False keeps all samples and repeats ``-N % size`` instead, again of
            the largest classes. Either way all ranks get the same number.
        batch_size: orders the shard so that its consecutive batches of this many samples have
            the class proportions of the shard: for every class, a batch's count differs from
            ``class count in shard * batch / shard length`` by less than one, or less than
            ``1 + 1/full batches`` where a shorter batch comes last.

    Returns:
        int64 array of length ``N // size``, or ``ceil(N / size)`` with ``drop_last=False``.

    Raises:
        ValueError: an argument has the wrong shape, range or kind, or a value is not finite;
            the message says what to change.

    Blocks dealt at random are Fisher's randomized block design. Swapping samples to level first
    and second moments is k-plus anticlustering (Papenberg, doi:10.1111/bmsp.12315), an exchange
    method after Papenberg and Klau (doi:10.1037/met0000301).
    """
    _, codes, columns = _samples(labels, features)
    _check_place(len(codes), rank, size)
    table = _shards(codes, columns, size, seed, epoch, drop_last)
    shard = table[:, rank].copy()
    del table
    # Of its own for each rank: where batches are off by part of a sample, the ranks' errors
    # then mostly cancel in the global batch instead of adding up.
    rng = _generator(seed, epoch, 1 + rank)
    if batch_size is None:
        rng.shuffle(shard)
        return shard
    batch_size = _integer("batch_size", batch_size, 1)
    if batch_size > len(shard):
        raise ValueError(
            f"batch_size is {batch_size} but a shard has only {len(shard)} samples; "
            "use smaller batches or fewer ranks"
        )
    key = None if columns is None else columns[shard, 0]
    return shard[_batches(codes[shard], key, batch_size, rng)]


def random_shard(
    n: int, rank: int, size: int, seed: int = 0, epoch: int = 0, drop_last: bool = True
) -> np.ndarray:
    """Indices of a random shard: the usual way, every subset is equally likely.

    Args:
        n: number of samples.
        rank, size, seed, epoch, drop_last: as in :func:`stratified_shard`.

    Returns:
        int64 array, of the same length on all ranks as in :func:`stratified_shard`.

    Raises:
        ValueError: an argument is out of range.
    """
    n = _integer("n", n, 1)
    _check_place(n, rank, size)
    order = _generator(seed, epoch, 0).permutation(n)
    return _trim(order, size, drop_last)[rank::size].copy()


def contiguous_shard(n: int, rank: int, size: int, drop_last: bool = True) -> np.ndarray:
    """Indices of the ``rank``-th of ``size`` consecutive stretches: what splitting a file gives.

    Args:
        n: number of samples.
        rank, size: as in :func:`stratified_shard`.
        drop_last: True leaves out the last ``n % size`` samples; False repeats the first
            ``-n % size``.

    Returns:
        int64 array in ascending order (except where it wraps), of the same length on all ranks.

    Raises:
        ValueError: an argument is out of range.
    """
    n = _integer("n", n, 1)
    _check_place(n, rank, size)
    return _trim(np.arange(n), size, drop_last).reshape(size, -1)[rank].copy()


@dataclass(frozen=True, eq=False)
class ShardReport:
    """How far shards are from the whole. ``str()`` is a table, :meth:`plot` a figure.

    ``S`` shards, ``C`` classes (0 without class labels), ``F`` features.
    """

    name: str
    """How the shards were made."""
    lengths: np.ndarray
    """``(S,)`` int64, samples in each shard."""
    classes: np.ndarray
    """``(C,)`` labels in ascending order."""
    counts: np.ndarray
    """``(S, C)`` int64, samples of each class in each shard."""
    whole_counts: np.ndarray
    """``(C,)`` int64, samples of each class in the whole."""
    feature_names: Tuple[str, ...]
    """``F`` names; regression targets are the feature ``"label"``."""
    mean: np.ndarray
    """``(S, F)`` float64, mean of each feature in each shard."""
    variance: np.ndarray
    """``(S, F)`` float64, variance (divided by the number of samples)."""
    whole_mean: np.ndarray
    """``(F,)`` float64."""
    whole_variance: np.ndarray
    """``(F,)`` float64."""

    @property
    def class_distance(self) -> np.ndarray:
        """``(S,)`` total variation distance to the whole's class proportions, from 0 to 1."""
        shard = self.counts / self.lengths[:, None]
        whole = self.whole_counts / max(1, self.whole_counts.sum())
        return np.abs(shard - whole).sum(axis=1) / 2

    @property
    def mean_shift(self) -> np.ndarray:
        """``(S, F)`` standardized mean difference: in standard deviations of the whole.

        0 for a feature that is constant.
        """
        spread = np.sqrt(self.whole_variance)
        shift = self.mean - self.whole_mean
        return np.divide(shift, spread, out=np.zeros_like(shift), where=spread > 0)

    @property
    def variance_ratio(self) -> np.ndarray:
        """``(S, F)`` variance of the shard divided by the whole's; 1 for a constant feature."""
        whole = self.whole_variance
        return np.divide(self.variance, whole, out=np.ones_like(self.variance), where=whole > 0)

    def __str__(self) -> str:
        shown, classes_shown = 20, 12
        head, rows = ["shard", "samples"], [[str(s), str(n)] for s, n in enumerate(self.lengths)]
        worst = ["worst", ""]

        def column(title, values, form, off):
            head.append(title)
            for row, value in zip(rows, values):
                row.append(form.format(value))
            worst.append(form.format(values[np.argmax(np.abs(values - off))]))

        if len(self.classes):
            column("class distance", self.class_distance, "{:.5f}", 0)
        for f, name in enumerate(self.feature_names):
            column(f"shift({name})", self.mean_shift[:, f], "{:+.5f}", 0)
            column(f"variance({name})", self.variance_ratio[:, f], "{:.5f}", 1)
        if len(self.classes) <= classes_shown:
            for c, label in enumerate(self.classes):
                ideal = self.whole_counts[c] * self.lengths.mean() / self.whole_counts.sum()
                column(f"n({label})", self.counts[:, c], "{}", ideal)
        hidden = len(rows) - shown
        lines = [head] + rows[:shown] + [worst]
        widths = [max(map(len, cells)) for cells in zip(*lines)]
        text = ["  ".join(c.rjust(w) for c, w in zip(line, widths)).rstrip() for line in lines]
        if hidden > 0:
            text.insert(-1, f"... and {hidden} more shards")
        summary = f"{self.name} shards: {len(rows)}"
        if len(self.classes):
            summary += f", classes: {len(self.classes)}"
        return "\n".join([summary] + text)

    def plot(self, path_or_ax: Any) -> Any:
        """Draw each shard's distances to the whole; all are 0 for perfect shards.

        Args:
            path_or_ax: a file to write, or matplotlib axes to draw into.

        Returns:
            The axes.

        Raises:
            ImportError: a path is given and matplotlib is not installed.
        """
        if hasattr(path_or_ax, "plot"):
            ax, figure = path_or_ax, None
        else:
            try:
                from matplotlib.figure import Figure  # not pyplot: needs no display, keeps no state
            except ImportError as error:
                raise ImportError(
                    "plotting a ShardReport needs matplotlib: pip install matplotlib"
                ) from error
            figure = Figure(figsize=(7, 4), layout="constrained")
            ax = figure.subplots()
        ranks = np.arange(len(self.lengths))
        if len(self.classes):
            ax.plot(ranks, self.class_distance, "o-", label="class distance")
        for f, name in enumerate(self.feature_names):
            ax.plot(ranks, np.abs(self.mean_shift[:, f]), "s--", label=f"{name}: |mean shift|")
            off = np.abs(self.variance_ratio[:, f] - 1)
            ax.plot(ranks, off, "^:", label=f"{name}: |variance ratio - 1|")
        ax.set_xlabel("shard")
        ax.set_ylabel("distance to the whole")
        ax.set_title(f"{self.name} shards")
        ax.set_ylim(bottom=0)
        ax.legend()
        if figure is not None:
            figure.savefig(path_or_ax)
        return ax


def shard_report(
    labels: ArrayLike,
    size: Optional[int] = None,
    *,
    features: Optional[ArrayLike] = None,
    shards: Optional[Sequence] = None,
    sharder: str = "stratified",
    seed: int = 0,
    epoch: int = 0,
    drop_last: bool = True,
) -> ShardReport:
    """Compare every shard with the whole.

    Args:
        labels: as in :func:`stratified_shard`.
        size: number of shards; not needed with ``shards``.
        features: as in :func:`stratified_shard`.
        shards: index arrays to look at, whoever made them.
        sharder: else how to make them: ``"stratified"``, ``"random"`` or ``"contiguous"``.
            ``"stratified"`` balances the features that are given.
        seed, epoch, drop_last: as in :func:`stratified_shard`.

    Raises:
        ValueError: as in :func:`stratified_shard`; an index is out of range; a shard is empty;
            ``sharder`` is none of the three.
    """
    classes, codes, columns = _samples(labels, features)
    n = len(codes)
    if shards is not None:
        if size is not None and size != len(shards):
            raise ValueError(f"size is {size} but there are {len(shards)} shards; leave out size")
        sharder, shards = "given", [np.asarray(shard) for shard in shards]
    else:
        if size is None:
            raise ValueError("give size, the number of shards, or the shards themselves")
        _check_place(n, 0, size)
        if sharder == "stratified":
            shards = list(_shards(codes, columns, size, seed, epoch, drop_last).T)
        elif sharder == "random":
            shards = [random_shard(n, r, size, seed, epoch, drop_last) for r in range(size)]
        elif sharder == "contiguous":
            shards = [contiguous_shard(n, r, size, drop_last) for r in range(size)]
        else:
            raise ValueError(
                f"sharder must be 'stratified', 'random' or 'contiguous', not {sharder!r}; "
                "give other shards as shards="
            )
    if not shards:
        raise ValueError("shards is empty; give at least one index array")
    for r, shard in enumerate(shards):
        if shard.ndim != 1 or shard.dtype.kind not in "iu" or not len(shard):
            raise ValueError(
                f"shard {r} must be a 1-D array of at least one index, not {shard.dtype} "
                f"of shape {shard.shape}"
            )
        if shard.min() < 0 or shard.max() >= n:
            raise ValueError(f"shard {r} has an index outside of 0 to {n - 1}; the data has {n}")
    if columns is None:
        columns = np.empty((n, 0))
    names = tuple(f"feature {f}" for f in range(columns.shape[1]))
    if labels is not None and classes is None:
        names = ("label",) + names[:-1]
    if classes is None:
        classes, counts = np.empty(0), np.empty((len(shards), 0), np.int64)
        whole_counts = np.empty(0, np.int64)
    else:
        counts = np.array([np.bincount(codes[s], minlength=len(classes)) for s in shards])
        whole_counts = np.bincount(codes, minlength=len(classes))
    return ShardReport(
        name=sharder,
        lengths=np.array([len(s) for s in shards]),
        classes=classes,
        counts=counts,
        whole_counts=whole_counts,
        feature_names=names,
        mean=np.array([columns[s].mean(axis=0) for s in shards]),
        variance=np.array([columns[s].var(axis=0) for s in shards]),
        whole_mean=columns.mean(axis=0),
        whole_variance=columns.var(axis=0),
    )


def image_features(images: Any) -> np.ndarray:
    """Mean and standard deviation of each image's values, for ``features=``.

    Args:
        images: ``(N, H, W)`` or ``(N, H, W, C)`` numbers, for instance uint8. An array on disk
            (``np.memmap``, an HDF5 data set) is read in pieces of some megabytes.

    Returns:
        ``(N, 2)`` float64, computed in float64 whatever the images' type.

    Raises:
        ValueError: the images have fewer than two dimensions, or no pixels.
    """
    if not hasattr(images, "shape"):
        images = np.asarray(images)
    pixels = int(np.prod(images.shape[1:]))
    if len(images.shape) < 2 or not pixels:
        raise ValueError(
            f"images must have shape (N, height, width) or (N, height, width, channels), "
            f"not {tuple(images.shape)}"
        )
    n = images.shape[0]
    result = np.empty((n, 2))
    step = max(1, _CHUNK_VALUES // pixels)
    for i in range(0, n, step):
        chunk = np.asarray(images[i : i + step]).reshape(-1, pixels).astype(np.float64)
        chunk.mean(axis=1, out=result[i : i + step, 0])
        chunk.std(axis=1, out=result[i : i + step, 1])
    return result


def directory_labels(root: Union[str, Path]) -> Tuple[List[str], np.ndarray, List[str]]:
    """Files and labels of a tree with one directory per class, in the same order everywhere.

    Hidden files and directories are skipped, and so are files directly in ``root``.

    Args:
        root: the directory that has the class directories.

    Returns:
        ``(paths, labels, class_names)``: ``N`` file paths, ``(N,)`` int64 labels that index the
        sorted class names.

    Raises:
        ValueError: there is no class directory, or no file in any.
        OSError: ``root`` cannot be read.
    """
    root = Path(root)
    names = sorted(p.name for p in root.iterdir() if p.is_dir() and p.name[0] != ".")
    paths: List[str] = []
    labels: List[int] = []
    for label, name in enumerate(names):
        files = [p for p in (root / name).rglob("*") if p.is_file()]
        inside = [p.relative_to(root).as_posix() for p in files]
        inside = sorted(p for p in inside if "/." not in p)
        paths += [str(root / p) for p in inside]
        labels += [label] * len(inside)
    if not paths:
        raise ValueError(f"no files found as {root}/<class name>/<file>; is this the right folder?")
    return paths, np.array(labels, np.int64), names


def file_shard(
    paths: Sequence,
    rank: int,
    size: int,
    counts: Optional[Sequence[int]] = None,
    *,
    seed: int = 0,
    epoch: int = 0,
) -> Tuple[list, int]:
    """Deal files (TFRecord files, say) when the samples cannot be dealt one by one.

    Large files go first, each to the rank that has the fewest records so far (Graham's LPT
    rule). Any two ranks' totals differ by at most the largest file. As files rarely add up to
    equal totals, the number of records that every rank has is returned too::

        files, records = file_shard(paths, hvd.rank(), hvd.size(), counts)
        data = tf.data.TFRecordDataset(files).take(records)

    Args:
        paths: at least ``size`` file names, in any order.
        rank, size, seed, epoch: as in :func:`stratified_shard`.
        counts: records in each of ``paths``. None: the same in all, which is not checked.

    Returns:
        ``(files, common)``: the rank's part of ``paths`` in random order, and the smallest total
        of all ranks, in records (in files if ``counts`` is None).

    Raises:
        ValueError: fewer files than ranks, a path appears twice, counts that do not fit the
            paths or are below 1, or an argument is out of range.
    """
    paths = list(paths)
    _check_place(len(paths), rank, size, what="files")
    weights = np.ones(len(paths), np.int64) if counts is None else np.asarray(counts)
    if weights.shape != (len(paths),) or weights.dtype.kind not in "iu" or weights.min() < 1:
        raise ValueError(
            f"counts must be {len(paths)} positive integers, one for each path; "
            "leave out empty files"
        )
    # Sorted by name first, as directory listings differ between hosts.
    names = [os.fspath(p) for p in paths]
    if len(set(names)) < len(names):
        raise ValueError("paths has a file twice; each rank's files must be its own")
    order = np.array(sorted(range(len(names)), key=names.__getitem__))
    rng = _generator(seed, epoch, 0)
    # Sizes blurred by a tenth: else unequal files would meet in the same groups every epoch.
    blurred = weights[order] * rng.uniform(0.9, 1, len(order))
    order = order[np.argsort(-blurred, kind="stable")]
    loads = [(0, tie, r) for tie, r in enumerate(rng.permutation(size).tolist())]
    mine = []
    for i in order.tolist():
        load, tie, r = loads[0]
        heapq.heapreplace(loads, (load + int(weights[i]), tie, r))
        if r == rank:
            mine.append(paths[i])
    rng = _generator(seed, epoch, 1 + rank)
    return [mine[i] for i in rng.permutation(len(mine))], loads[0][0]


# --- Dealing --------------------------------------------------------------------------------


def _shards(codes, columns, size, seed, epoch, drop_last) -> np.ndarray:
    """All shards: the columns of a (length, size) table of sample numbers."""
    rng = _generator(seed, epoch, 0)
    key = None if columns is None else columns[:, 0]
    full, loose = _deal(codes, key, size, rng, wrap=not drop_last)
    if columns is not None:
        _level(full, loose, _moments(columns), rng)
    return np.concatenate([full, loose])


def _deal(codes, key, parts, rng, wrap=False) -> Tuple[np.ndarray, np.ndarray]:
    """Deal the samples to ``parts`` columns so that each has its share of every class.

    Returns two tables of sample numbers with ``parts`` columns. Each row of the first has
    samples of one class, next to each other in the order of ``key``; the second has the rest.

    That every column ends up with the same number of samples, and with every class within one
    of ``n_c / parts``, is always possible. Deal each class's samples in complete rows while
    they last; ``n_c % parts`` are left. Leave out ``N % parts`` of all these leftovers. Put the
    others in a line, class after class, and deal them round: a class is a stretch of at most
    ``parts`` neighbours, so they fall into different columns, and each column has either
    ``floor(n_c / parts)`` samples of the class or one more. The line's length is a multiple of
    ``parts``, so the rows come out even. There are enough leftovers to leave out: their sum is
    congruent to ``N``, so it is at least ``N % parts``.

    The rows come out even for any choice of what to leave out. If only leftovers could go, a
    class of one sample would go in every epoch next to one whose count ``parts`` divides. So
    such a class may break its last complete row: its columns then have ``n_c / parts`` or one
    less, still within one. Repeating ``-N % parts`` samples instead is the same argument with
    the free places ``parts - n_c % parts`` in place of the leftovers.
    """
    order, counts = _by_class(codes, rng)
    start = np.cumsum(counts) - counts
    loose = counts % parts
    cut = add = np.zeros_like(counts)
    if wrap:
        missing = -len(codes) % parts
        room = parts - loose
        add = _share(missing, np.minimum(room, counts), counts, rng)  # each sample once ...
        add += _share(missing - add.sum(), room - add, counts, rng)  # ... if that is enough
    else:
        cut = _share(len(codes) % parts, (counts - 1) % parts + 1, counts, rng)
        loose = np.where(cut > loose, parts, loose)
    # A class's samples are in random order, so its first are as good as any: those taken, those
    # cut, and then complete rows. Repeats run on into these, and round if need be.
    taken = loose + add - cut
    of_class = np.repeat(np.arange(len(counts)), taken)
    turn = np.arange(len(of_class)) - np.repeat(np.cumsum(taken) - taken, taken)
    rest = order[start[of_class] + turn % counts[of_class]].reshape(-1, parts)
    full = order[np.arange(len(order)) >= np.repeat(start + loose, counts)]
    if key is not None:
        full = full[np.argsort(key[full], kind="stable")]
        full = full[np.argsort(codes[full], kind="stable")]
    full = full.reshape(-1, parts)
    return rng.permuted(full, axis=1, out=full), rest[:, rng.permutation(parts)]


def _by_class(codes, rng) -> Tuple[np.ndarray, np.ndarray]:
    """All sample numbers, class after class, in random order inside; the classes' counts."""
    order = rng.permutation(len(codes))
    return order[np.argsort(codes[order], kind="stable")], np.bincount(codes)


def _share(total, room, counts, rng) -> np.ndarray:
    """Divide ``total`` among classes, at most ``room`` each: the largest, who feel it least."""
    order = np.lexsort((rng.random(len(counts)), -counts))
    part = np.zeros_like(counts)
    before = np.cumsum(room[order]) - room[order]
    part[order] = np.clip(total - before, 0, room[order])
    return part


def _moments(columns) -> List[np.ndarray]:
    """First and second moments of each feature as columns of mean 0 and variance 1.

    Shards that agree in the sums of these agree in mean and variance.

    Ranks that differ in one rounding could come to different deals. So there is no matrix
    product, linear algebra or transcendental function here or in _level: their last bits
    depend on the processor. Single operations and NumPy's sums do not.
    """
    moments = []
    for f in range(columns.shape[1]):
        x = columns[:, f]
        largest = np.abs(x).max()
        if largest > 0:
            x = x / largest  # squares of any finite number fit
        x = _standard(x)
        moments += [x, _standard(x * x)]
    return moments


def _standard(x) -> np.ndarray:
    x = x - x.mean()
    spread = x.std()
    return x / spread if spread > 0 else x * 0


def _level(full, loose, moments, rng) -> None:
    """Swap samples inside rows of ``full`` until the columns' sums of ``moments`` agree.

    A row has one class, so no swap changes a class count. In each round the columns meet in
    random pairs, and of a few rows each pair swaps in the one that most narrows the gap between
    its sums. Time does not grow with the number of samples: the gaps do, but only with its
    square root, and a thousand swaps by far outdo them.
    """
    size = full.shape[1]
    rows = rng.permutation(len(full))[: max(1, _SWAP_VALUES // (size * len(moments)))]
    if size == 1 or not len(rows):
        return
    sums = np.stack([m[full].sum(axis=0) + m[loose].sum(axis=0) for m in moments])
    values = np.stack([m[full[rows].T] for m in moments])  # (moments, size, rows)
    step = max(1, _ROUND_VALUES // size)
    chunks = [slice(i, i + step) for i in range(0, len(rows), step)]
    pairs = np.arange(size // 2)
    for turn in range(_SWAP_ROUNDS):
        a, b = rng.permutation(size)[: 2 * len(pairs)].reshape(2, -1)
        chunk = chunks[turn % len(chunks)]
        gap = sums[:, a] - sums[:, b]
        difference = values[:, a, chunk] - values[:, b, chunk]
        remaining = np.square(gap[:, :, None] - 2 * difference).sum(axis=0)
        best = remaining.argmin(axis=1)
        better = remaining[pairs, best] < np.square(gap).sum(axis=0)
        if not better.any():
            break  # so near that other pairs and rows would gain little
        moved = difference[:, pairs, best][:, better]
        a, b, best = a[better], b[better], best[better] + chunk.start
        sums[:, a] -= moved
        sums[:, b] += moved
        values[:, a, best], values[:, b, best] = values[:, b, best], values[:, a, best]
        best = rows[best]
        full[best, a], full[best, b] = full[best, b], full[best, a]


def _batches(codes, key, batch_size, rng) -> np.ndarray:
    """An order in which consecutive batches have their share of every class."""
    n = len(codes)
    number, short = divmod(n, batch_size)
    keep, last = np.arange(n), np.arange(0)
    if short:
        # The short batch by systematic sampling: every n/short-th in the order of classes, so a
        # stretch of n_c neighbours gives n_c * short / n, rounded up or down.
        order, _ = _by_class(codes, rng)
        chosen = (np.arange(short) * n + rng.integers(n)) // short
        last, keep = rng.permutation(order[chosen]), np.delete(order, chosen)
    full, loose = _deal(codes[keep], None if key is None else key[keep], number, rng)
    batches = rng.permuted(np.concatenate([full, loose]).T, axis=1)
    return np.concatenate([keep[batches.ravel()], last])


def _trim(order, size, drop_last) -> np.ndarray:
    """``order`` shortened or wrapped to a multiple of ``size``."""
    n = len(order)
    return order[: n - n % size] if drop_last else np.concatenate([order, order[: -n % size]])


def _generator(seed, epoch, stream) -> np.random.Generator:
    """Stream 0 is the same on all ranks, ``1 + rank`` is the rank's own."""
    key = (_integer("epoch", epoch, 0), stream)
    return np.random.default_rng(np.random.SeedSequence(_integer("seed", seed, 0), spawn_key=key))


# --- Arguments ------------------------------------------------------------------------------


def _integer(name, value, least) -> int:
    try:
        value = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, not {value!r}") from None
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
    return value


def _check_place(n, rank, size, what="samples") -> None:
    size = _integer("size", size, 1)
    if _integer("rank", rank, 0) >= size:
        raise ValueError(f"rank is {rank} but ranks go from 0 to size - 1 = {size - 1}")
    if size > n:
        raise ValueError(f"{n} {what} cannot be dealt to {size} ranks; use at most {n} ranks")


def _samples(labels, features):
    """``(classes or None, codes, columns or None)`` of checked labels and features."""
    if labels is None and features is None:
        raise ValueError("give labels, features or both; random_shard needs neither")
    classes = columns = None
    if labels is not None:
        labels = np.asarray(labels)
        if labels.dtype.kind == "O":
            labels = np.array(labels.tolist())  # a table's column of strings, say
        if labels.ndim != 1:
            raise ValueError(
                f"labels must have shape (N,), not {labels.shape}; use labels.ravel() for one "
                "column, labels.argmax(axis=1) for one-hot rows"
            )
        if labels.dtype.kind == "f":
            columns = _columns("labels", labels)
        else:
            classes, codes = _encode(labels)
    if features is not None:
        features = _columns("features", np.asarray(features))
        if labels is not None and len(features) != len(labels):
            raise ValueError(
                f"there are {len(labels)} labels but features of {len(features)} samples; "
                "give one row of features for each label"
            )
        columns = features if columns is None else np.concatenate([columns, features], axis=1)
    if classes is None:
        codes = np.zeros(len(columns), np.uint8)
    if not len(codes):
        raise ValueError("there are no samples; labels and features must not be empty")
    return classes, codes, columns


def _columns(name, values) -> np.ndarray:
    if values.ndim == 1:
        values = values[:, None]
    if values.ndim != 2 or values.shape[1] == 0 or values.dtype.kind not in "biuf":
        raise ValueError(
            f"{name} must be real numbers of shape (N,) or (N, F), not {values.dtype} of shape "
            f"{values.shape}; reduce each sample to a few statistics"
        )
    values = values.astype(np.float64)
    bad = ~np.isfinite(values).all(axis=1)
    if bad.any():
        raise ValueError(
            f"{name} of {bad.sum()} samples are NaN or infinite, first of sample {bad.argmax()}; "
            "replace them or leave these samples out"
        )
    return values


def _encode(labels) -> Tuple[np.ndarray, np.ndarray]:
    """Sorted classes, and each label's place among them in the smallest unsigned type.

    The type is for speed: NumPy's stable sort of 8 or 16 bits is a radix sort, ten times faster.
    """
    kind = labels.dtype.kind
    if kind not in "biuSU":
        raise ValueError(
            f"labels must be integers, strings, bools or floats, not {labels.dtype}; "
            "convert them with labels.astype(...)"
        )
    if kind in "iu" and len(labels):
        # Labels are mostly 0 to C-1: then a table replaces the sort of all samples.
        low, high = int(labels.min()), int(labels.max())
        if high - low < 1 << 16:
            # Arithmetic modulo 2**16 is exact for such differences, even of 64-bit labels.
            offset = labels.astype(np.uint16) - np.uint16(low % (1 << 16))
            present = np.bincount(offset) > 0
            place = _narrow(np.cumsum(present) - 1, present.sum())
            classes = np.flatnonzero(present).astype(labels.dtype) + labels.dtype.type(low)
            return classes, place[offset]
    classes, codes = np.unique(labels, return_inverse=True)
    return classes, _narrow(codes, len(classes))


def _narrow(codes, count) -> np.ndarray:
    return codes.astype(np.min_scalar_type(max(0, int(count) - 1)), copy=False)
