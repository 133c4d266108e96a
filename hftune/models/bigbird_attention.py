"""BigBird's block-sparse self-attention, with gathered blocks or FlexAttention. Independent of model and task."""

# Shapes: B batch, H heads, T tokens (padded), S tokens of a block, N = T / S blocks, M = N - 2 blocks between first and last,
# K key blocks that a query block sees, R random ones among them, D width of a head, C width of the model. Gathered:
# X = B H M query blocks, Y = K S keys of each.

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from hftune.errors import ConfigError, first_line
from hftune.models.packing import RealTokens
from hftune.models.trial import kernel_problem

NUM_FIXED_BLOCKS = 5  # the first and the last block, which are global, and a window of three blocks
GATHERED_ON_CPU = 2**18  # numbers in the gathered keys for each thread: 1 MiB of float32 fits a core's cache
GATHERED_ELSEWHERE = 2**26  # 256 MiB of float32: all heads at once, for few and large kernels
MAX_GRID = 65_535  # query blocks at once elsewhere: CUDA's limit for the dimension that attention uses for rows
FLEX_TOKENS = 4096  # FlexAttention sees multiples of it, so that it is compiled for a few sizes only
KERNELS = ("auto", "gathered", "flex")
NO_FLEX_ON_CPU = (
    "task.model_config.block_sparse_kernel=flex cannot train on a CPU: FlexAttention has no backward pass there (torch 2.13). "
    "Use block_sparse_kernel=gathered."
)


class BlockSparseSelfAttention(nn.Module):
    """Attend to the first, the last, three neighbouring and ``num_random_blocks`` random blocks; global blocks see everything.

    Weights and state-dict names are those of transformers' ``BigBirdSelfAttention`` and ``BigBirdBlockSparseAttention``.
    Differences from the latter (transformers 5.23, modeling_big_bird.py):

    - Random blocks come from a generator seeded by (``random_blocks_seed``, layer), so training and evaluation compute the
      same function. In transformers, every training forward pass calls ``np.random.seed``, and evaluation uses block 0 for all
      of them (huggingface/transformers#20031, closed, unchanged).
    - A row's blocks depend on its own length, not on the padding: its last global block has its own last token, and its random
      blocks are within the row. A row of at most 5 + R blocks has full attention. So a row's result depends neither on other
      rows nor on the micro-batch, and the choice of kernel (full attention if the padded batch has at most 5 + R blocks)
      affects speed only: ranks with batches of different lengths still train the same function. transformers chooses at
      5 + 2R blocks, for the whole batch, and never returns from full attention.
    - Random blocks come from the whole row, as in the paper; in transformers, from the first 5 + 2R blocks or 1024 tokens.

    ``block_sparse_kernel`` affects speed only: "gathered" gathers the keys of each query block for a fused kernel; "flex" is
    torch's FlexAttention, compiled for the blocks seen, without copies. "auto" is flex on GPUs where a small example of it
    compiles and is right, and gathered elsewhere. On CPUs, torch 2.13 compiles flex for the forward pass only. This is tested
    on CPUs; nothing is on GPUs.

    Rows are padded on the right. There is no attention dropout, as in transformers' block-sparse path: the fused kernel for
    CPUs has none, and the two kernels must be the same function.

    Source: Zaheer et al., Big Bird: Transformers for Longer Sequences, 2020, section 2 (the ITC variant).
    """

    def __init__(self, config: Any, layer_index: int) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.block_size = config.block_size
        self.num_random_blocks = config.num_random_blocks
        self.sparse = config.attention_type == "block_sparse"
        self.kernel = config.block_sparse_kernel
        self.max_full_length = config.max_full_length
        self.max_blocks = -(-config.max_position_embeddings // config.block_size)
        self.seed = (config.random_blocks_seed << 20) + layer_index
        self.query = nn.Linear(config.hidden_size, config.hidden_size, bias=config.use_bias)
        self.key = nn.Linear(config.hidden_size, config.hidden_size, bias=config.use_bias)
        self.value = nn.Linear(config.hidden_size, config.hidden_size, bias=config.use_bias)
        self._priorities: Tensor | None = None

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, tokens: RealTokens | None = None, **unused: Any
    ) -> tuple[Tensor, None]:
        """Return the context (B, T, C) of ``hidden_states`` (B, T, C), and None for the attention weights, which are not kept.

        ``attention_mask`` (B, T): true for real tokens; None if all are. T must be a multiple of the block size if it exceeds
        5 + R blocks. With ``tokens``, hidden states and context have those only.

        Raises:
            ConfigError: FlexAttention cannot run here.
        """
        projected = (layer(hidden_states) for layer in (self.query, self.key, self.value))
        q_BHTD, k_BHTD, v_BHTD = (
            (x if tokens is None else tokens.unpack(x)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in projected
        )
        if not self.sparse or q_BHTD.shape[2] <= self.max_full_length:
            mask_B11T = None if attention_mask is None else attention_mask.bool()[:, None, None]
            context_BHTD = scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, mask_B11T)
        else:
            if attention_mask is None:
                attention_mask = q_BHTD.new_ones(q_BHTD.shape[::2], dtype=torch.bool)
            attend = self._attend_flex if self._flex_is_used(q_BHTD) else self._attend_gathered
            context_BHTD = attend(q_BHTD, k_BHTD, v_BHTD, attention_mask.bool())
        context_BTC = context_BHTD.transpose(1, 2).flatten(2)
        return context_BTC if tokens is None else tokens.pack(context_BTC), None

    def _last_blocks(self, valid_BT: Tensor) -> Tensor:
        T, S = valid_BT.shape[1], self.block_size
        if T % S:
            raise ValueError(f"{T} tokens are not a multiple of the block size {S}. Pad them.")
        return (valid_BT * torch.arange(T, device=valid_BT.device)).amax(1) // S

    def _flex_is_used(self, q_BHTD: Tensor) -> bool:
        if self.kernel != "auto":
            return self.kernel == "flex"
        if q_BHTD.device.type == "cpu":
            return False
        problem = flex_problem(q_BHTD.device, q_BHTD.dtype, q_BHTD.shape[-1], self.block_size)
        if problem is not None:
            warnings.warn(
                f"FlexAttention cannot be used here ({problem}): block-sparse attention gathers blocks instead, which computes "
                "the same and is slower. To hide this, set task.model_config.block_sparse_kernel=gathered.",
                stacklevel=1,
            )  # Python shows it once
        return problem is None

    def _attend_flex(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, valid_BT: Tensor) -> Tensor:
        """Attend with all rows in one, padded at the end: only the number of tokens differs between batches."""
        if q_BHTD.device.type == "cpu" and q_BHTD.requires_grad:
            raise ConfigError(NO_FLEX_ON_CPU)
        (B, H, T, D), S = q_BHTD.shape, self.block_size
        unit = -(-FLEX_TOKENS // S) * S
        missing = -(B * T) % unit
        q, k, v = (
            nn.functional.pad(x_BHTD.transpose(0, 1).reshape(1, H, B * T, D), (0, 0, 0, missing))
            for x_BHTD in (q_BHTD, k_BHTD, v_BHTD)
        )
        try:
            context = run_flex(q, k, v, self.block_mask(valid_BT, missing // S))
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            raise ConfigError(
                f"task.model_config.block_sparse_kernel=flex cannot be compiled here ({first_line(error)}). "
                "Use block_sparse_kernel=gathered."
            ) from error
        return context[0, :, : B * T].unflatten(1, (B, T)).transpose(0, 1)

    def block_mask(self, valid_BT: Tensor, num_empty: int = 0) -> BlockMask:
        """Return the blocks that FlexAttention must visit, all rows in one, from the block indices of each row.

        No mask over tokens is made. ``num_empty`` blocks at the end see nothing.
        """
        S, (B, T) = self.block_size, valid_BT.shape
        N = T // S
        last_B = self._last_blocks(valid_BT)
        blocks_BHMK, used_BHMK = self.key_blocks(last_B, N)
        seen_BHNN = torch.zeros(B, self.num_heads, N, N, dtype=torch.int32, device=valid_BT.device)
        seen_BHNN[:, :, 1:-1].scatter_add_(3, blocks_BHMK, used_BHMK.int())
        row_B = torch.arange(B, device=last_B.device)
        seen_BHNN[:, :, 0] = 1
        seen_BHNN[row_B, :, last_B] = 1
        seen_BHNN = seen_BHNN.bool()
        seen_1HNN = seen_BHNN.new_zeros(1, self.num_heads, B * N + num_empty, B * N + num_empty)
        seen_HBNBN = seen_1HNN[0, :, : B * N, : B * N].unflatten(2, (B, N)).unflatten(1, (B, N))
        seen_HBNBN[:, row_B, :, row_B] = seen_BHNN  # rows do not see each other
        return _block_mask(seen_1HNN, nn.functional.pad(valid_BT.flatten(), (0, num_empty * S)), S)

    def _attend_gathered(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, valid_BT: Tensor) -> Tensor:
        B, H, T, D = q_BHTD.shape
        S, N = self.block_size, T // self.block_size
        last_B = self._last_blocks(valid_BT)
        q_BHNSD, k_BHNSD, v_BHNSD = (x_BHTD.reshape(B, H, N, S, D) for x_BHTD in (q_BHTD, k_BHTD, v_BHTD))

        # All heads at once: on CPUs, the backward pass of the kernel is parallel over rows and heads only (torch 2.13).
        q_last_BH1SD = q_BHNSD.gather(2, last_B.view(B, 1, 1, 1, 1).expand(B, H, 1, S, D))
        q_global_BHTD = torch.cat([q_BHNSD[:, :, :1], q_last_BH1SD], 2).view(B, H, 2 * S, D)
        global_BHTD = scaled_dot_product_attention(q_global_BHTD, k_BHTD, v_BHTD, valid_BT[:, None, None])
        first_BH1SD, last_BH1SD = global_BHTD.view(B, H, 2, S, D).split(1, 2)

        # Gathered blocks are 5 + R times as large as keys and values. They are gathered again in the backward pass, and thus
        # never held for all layers.
        attend = _attend_middle_on_cpu if q_BHTD.device.type == "cpu" else _attend_middle
        middle_BHMSD = attend(q_BHNSD[:, :, 1:-1], k_BHNSD, v_BHNSD, *self.key_blocks(last_B, N), valid_BT)

        context_BHNSD = torch.cat([first_BH1SD, middle_BHMSD, last_BH1SD], 2)
        # The last block of a row that is shorter than the batch is among the middle blocks.
        place = (torch.arange(B * H, device=last_B.device).view(B, H) * N + last_B[:, None]).flatten()
        context_BHNSD.view(B * H * N, S * D).index_copy_(0, place, last_BH1SD.reshape(B * H, S * D))
        return context_BHNSD.view(B, H, T, D)

    def key_blocks(self, last_B: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
        """Return which blocks the query blocks 1 ... N - 2 see, (B, H, M, K) int64, and whether each counts (bool).

        ``last_B``: index of each row's last block. A block does not count if it is in the list twice or beyond the row. Results
        for a row's last block and its padding have no meaning.
        """
        random_BHMR, drawn_BHMR = self.random_blocks(last_B, num_blocks)
        B, H, M, _ = random_BHMR.shape
        i_1M = torch.arange(1, num_blocks - 1, device=last_B.device)[None]
        last_B1 = last_B[:, None]
        zero_BM, last_BM, i_BM = torch.zeros_like(last_B1 + i_1M), last_B1.expand(B, M), i_1M.expand(B, M)
        fixed_BMF = torch.stack([zero_BM, i_BM - 1, i_BM, i_BM + 1, last_BM], -1)
        once_BMF = torch.stack(
            [i_BM > 0, (i_BM > 1) & (i_BM - 1 < last_BM), i_BM < last_BM, i_BM + 1 < last_BM, last_BM > 0], -1
        )
        shape = (B, H, M, NUM_FIXED_BLOCKS)
        blocks_BHMK = torch.cat([fixed_BMF[:, None].expand(shape), random_BHMR], -1)
        used_BHMK = torch.cat([once_BMF[:, None].expand(shape), drawn_BHMR], -1)
        # A row with no more blocks than the list has entries sees them all.
        all_K = torch.arange(blocks_BHMK.shape[-1], device=last_B.device)
        short_B111 = (last_B < len(all_K)).view(B, 1, 1, 1)
        return (
            torch.where(short_B111, all_K, blocks_BHMK),
            torch.where(short_B111, all_K <= last_B.view(B, 1, 1, 1), used_BHMK),
        )

    def random_blocks(self, last_B: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
        """Return the random blocks of each query block, (B, H, M, R) int64, and whether each exists (bool).

        Each head has a random order of key blocks, the same at every length. Its first R blocks that are inside the row, not
        global and not in the window are used.
        """
        if self._priorities is None or self._priorities.device != last_B.device:
            # float64 has no ties, which devices might break differently. On the CPU, so that it is the same for all devices.
            generator = torch.Generator().manual_seed(self.seed)
            shape = (self.num_heads, self.max_blocks, self.max_blocks)
            self._priorities = torch.rand(shape, generator=generator, dtype=torch.float64).to(last_B.device)
        i_M1 = torch.arange(1, num_blocks - 1, device=last_B.device)[:, None]
        j_N = torch.arange(num_blocks, device=last_B.device)
        free_BMN = ((i_M1 - j_N).abs() > 1) & (j_N > 0) & (j_N < last_B[:, None, None])
        order_HMN = self._priorities[:, 1 : num_blocks - 1, :num_blocks]
        priority_BHMR, random_BHMR = order_HMN.where(free_BMN[:, None], -1.0).topk(self.num_random_blocks)
        return random_BHMR, priority_BHMR >= 0


@cache
@torch.inference_mode(False)  # its tensors are saved for the backward pass
def flex_problem(device: torch.device, dtype: torch.dtype, width: int, block_size: int) -> str | None:
    """Return why FlexAttention cannot be used with heads of ``width``; None if a small example of it is right, both ways.

    Its backward pass is compiled when it is first run, in which it is too late for another kernel: hence an example.
    """
    if block_size % 16:
        return f"block_size={block_size} is not a multiple of 16"
    num_blocks, num_heads = 8, 2
    seen_NN = torch.ones(num_blocks, num_blocks, dtype=torch.bool, device=device).triu(-1)
    valid_T = torch.arange(num_blocks * block_size, device=device) < num_blocks * block_size - 3
    mask_TT = seen_NN.repeat_interleave(block_size, 0).repeat_interleave(block_size, 1) & valid_T
    block_mask = _block_mask(seen_NN.expand(1, num_heads, -1, -1), valid_T, block_size)
    return kernel_problem(
        lambda q, k, v: run_flex(q, k, v, block_mask),
        lambda q, k, v: scaled_dot_product_attention(q, k, v, mask_TT),
        (1, num_heads, len(valid_T), width),
        device,
        dtype,
    )


def run_flex(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, block_mask: BlockMask) -> Tensor:
    options = None
    if q_BHTD.device.type != "cpu":
        (side, _) = block_mask.BLOCK_SIZE
        tile = min(64, side & -side)  # the largest power of two in a block
        options = dict.fromkeys(("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), tile)
    return _compiled_flex(q_BHTD.device.type)(q_BHTD, k_BHTD, v_BHTD, block_mask=block_mask, kernel_options=options)


@cache
def _compiled_flex(device_type: str) -> Callable[..., Tensor]:
    """Return the compiled FlexAttention; run eagerly, it would hold T x T scores.

    From reading torch 2.13: tiles that do not fit blocks of 64 are left out before ``kernel_options`` are applied. On Hopper,
    the backward pass would have none left, because the only default has 128; "max-autotune" adds some of 64. With the tiles
    given, it compiles and compares a handful of numbers of stages. On CPUs, kernels for dynamic sizes do not compile
    ("cur_kvSplitSize1 was not declared").

    Raises:
        ConfigError: torch.compile has no ``recompile_limit`` yet, and would give up after eight numbers of tokens.
    """
    if torch.__version__ < "2.12":
        raise ConfigError(
            f"task.model_config.block_sparse_kernel=flex needs torch 2.12 or newer, not {torch.__version__}. "
            "Use block_sparse_kernel=gathered."
        )
    settings = {} if device_type == "cpu" else {"mode": "max-autotune-no-cudagraphs"}
    return torch.compile(flex_attention, fullgraph=True, dynamic=False, recompile_limit=64, **settings)


def _block_mask(seen_BHNN: Tensor, valid_T: Tensor, block_size: int) -> BlockMask:
    """Return FlexAttention's mask: queries see the valid tokens of the blocks ``seen_BHNN`` (bool; B is 1)."""
    whole_N = valid_T.view(-1, block_size).all(-1)  # without padding, so the kernel need not call ``sees``
    seen_BHNN = seen_BHNN & valid_T.view(-1, block_size).any(-1)

    def sees(row: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        return seen_BHNN[row, head, q_index // block_size, k_index // block_size] & valid_T[k_index]

    partial, whole = _counted(seen_BHNN & ~whole_N), _counted(seen_BHNN & whole_N)
    return BlockMask.from_kv_blocks(*partial, *whole, BLOCK_SIZE=block_size, mask_mod=sees)


def _counted(seen_BHNN: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks each query block sees (B, H, N), and which: the first indices of each row in (B, H, N, N)."""
    return seen_BHNN.sum(-1, dtype=torch.int32), seen_BHNN.int().argsort(dim=-1, descending=True, stable=True).int()


def _attend_middle(
    q_BHMSD: Tensor, k_BHNSD: Tensor, v_BHNSD: Tensor, blocks_BHMK: Tensor, used_BHMK: Tensor, valid_BT: Tensor
) -> Tensor:
    """Return the context (B, H, M, S, D) of middle blocks, each over the key blocks that ``blocks_BHMK`` names for it.

    Some heads at a time.
    """
    (B, _, M, K), (S, D) = blocks_BHMK.shape, q_BHMSD.shape[-2:]
    count = max(1, min(GATHERED_ELSEWHERE // (B * M * K * S * D), MAX_GRID // (B * M)))
    inputs, contexts = (q_BHMSD, k_BHNSD, v_BHNSD, blocks_BHMK, used_BHMK), []

    def attend(q: Tensor, k: Tensor, v: Tensor, gathered_XK: Tensor, mask_X11Y: Tensor) -> Tensor:
        keys_and_values = (_gather(_as_rows(x), gathered_XK, D) for x in (k, v))
        return scaled_dot_product_attention(_one_each(q), *keys_and_values, mask_X11Y).view(q.shape)  # type: ignore

    for *qkv, blocks, used in zip(*(x.split(count, 1) for x in inputs), strict=True):
        places_and_mask = _places(qkv[1].shape, blocks, used, valid_BT)
        # There is nothing random in it.
        contexts.append(checkpoint(attend, *qkv, *places_and_mask, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(contexts, 1)


def _attend_middle_on_cpu(
    q_BHMSD: Tensor, k_BHNSD: Tensor, v_BHNSD: Tensor, blocks_BHMK: Tensor, used_BHMK: Tensor, valid_BT: Tensor
) -> Tensor:
    """Return the same as ``_attend_middle``, faster."""
    return _GatheredAttention.apply(q_BHMSD, k_BHNSD, v_BHNSD, *_places(k_BHNSD.shape, blocks_BHMK, used_BHMK, valid_BT))


class _GatheredAttention(torch.autograd.Function):
    """The CPU kernel of scaled_dot_product_attention, on keys and values that the backward pass gathers again.

    A few query blocks at a time, whose gathered keys stay in the caches. ``checkpoint`` needs as little memory, but also reruns
    the forward kernel, which makes a layer a sixth slower.
    """

    @staticmethod
    def forward(ctx: Any, q_BHMSD: Tensor, k_BHNSD: Tensor, v_BHNSD: Tensor, gathered_XK: Tensor, mask_X11Y: Tensor) -> Tensor:
        S, D = q_BHMSD.shape[-2:]
        q_X1SD, k_rows, v_rows = _one_each(q_BHMSD), _as_rows(k_BHNSD), _as_rows(v_BHNSD)
        # What outlives the gathered keys is allocated before them; otherwise, freeing them would fragment the heap.
        context_X1SD = q_BHMSD.new_empty(len(gathered_XK), 1, S, D)
        logsumexp_X1S = q_BHMSD.new_empty(len(gathered_XK), 1, S, dtype=torch.promote_types(q_BHMSD.dtype, torch.float32))
        for part in _parts(gathered_XK, S * D):
            k, v = (_gather(rows, gathered_XK[part], D) for rows in (k_rows, v_rows))
            context_X1SD[part], logsumexp_X1S[part] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q_X1SD[part], k, v, attn_mask=_added(mask_X11Y[part], q_X1SD.dtype)
            )
        ctx.save_for_backward(q_BHMSD, k_BHNSD, v_BHNSD, gathered_XK, mask_X11Y, context_X1SD, logsumexp_X1S)
        return context_X1SD.view(q_BHMSD.shape)

    @staticmethod
    def backward(ctx: Any, gradient_BHMSD: Tensor) -> tuple[Tensor | None, ...]:
        q_BHMSD, k_BHNSD, v_BHNSD, gathered_XK, mask_X11Y, context_X1SD, logsumexp_X1S = ctx.saved_tensors
        S, D = q_BHMSD.shape[-2:]
        q_X1SD, gradient_X1SD, k_rows, v_rows = (
            *map(_one_each, (q_BHMSD, gradient_BHMSD)),
            *map(_as_rows, (k_BHNSD, v_BHNSD)),
        )
        q_grad_X1SD, k_grad, v_grad = torch.empty_like(q_X1SD), torch.zeros_like(k_rows), torch.zeros_like(v_rows)
        for part in _parts(gathered_XK, S * D):
            k, v = (_gather(rows, gathered_XK[part], D) for rows in (k_rows, v_rows))
            q_grad_X1SD[part], *of_gathered = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(gradient_X1SD[part], q_X1SD[part], k, v, context_X1SD[part], logsumexp_X1S[part]),
                dropout_p=0.0,
                is_causal=False,
                attn_mask=_added(mask_X11Y[part], q_X1SD.dtype),
            )
            for grad, gathered in zip((k_grad, v_grad), of_gathered, strict=True):
                grad.index_add_(0, gathered_XK[part].flatten(), gathered.reshape(-1, S * D))
        return q_grad_X1SD.view(q_BHMSD.shape), k_grad.view(k_BHNSD.shape), v_grad.view(v_BHNSD.shape), None, None


def _parts(gathered_XK: Tensor, numbers_of_block: int) -> list[slice]:
    """Cut the query blocks into parts whose gathered keys fit the caches. Does not change what is added up in which order."""
    (X, K) = gathered_XK.shape
    count = max(1, GATHERED_ON_CPU // (K * numbers_of_block)) * torch.get_num_threads()
    return [slice(start, start + count) for start in range(0, X, count)]


def _added(mask_X11Y: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as the numbers that are added to the scores."""
    return torch.zeros_like(mask_X11Y, dtype=dtype).masked_fill_(~mask_X11Y, -torch.inf)


def _places(shape_BHNSD: torch.Size, blocks_BHMK: Tensor, used_BHMK: Tensor, valid_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the flat indices of the named blocks among those of all rows and heads, and which of their keys count."""
    B, H, N, S, _ = shape_BHNSD
    K = blocks_BHMK.shape[-1]
    starts_BH11 = torch.arange(B * H, device=blocks_BHMK.device).view(B, H, 1, 1) * N
    gathered_XK = (starts_BH11 + blocks_BHMK).view(-1, K)
    valid_XKS = valid_BT.view(B, 1, N, S).expand(B, H, N, S).reshape(-1, S)[gathered_XK]
    return gathered_XK, (valid_XKS & used_BHMK.reshape(-1, K, 1)).view(-1, 1, 1, K * S)


def _as_rows(x_BHNSD: Tensor) -> Tensor:
    """Make every block a row, (B H N, S D)."""
    return x_BHNSD.reshape(-1, x_BHNSD.shape[-2] * x_BHNSD.shape[-1])


def _gather(rows: Tensor, gathered_XK: Tensor, width: int) -> Tensor:
    """Return the named blocks, (X, 1, Y, D)."""
    return rows.index_select(0, gathered_XK.flatten()).view(len(gathered_XK), 1, -1, width)


def _one_each(x_BHMSD: Tensor) -> Tensor:
    """Make every query block a row of its own, (X, 1, S, D)."""
    return x_BHMSD.reshape(-1, 1, *x_BHMSD.shape[-2:])
