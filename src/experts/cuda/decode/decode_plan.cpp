#include <fmt/format.h>

#include <algorithm>

#include "core/checked_math.hpp"
#include "experts/cuda/decode/decode_arguments.hpp"

namespace fusedmoe::cuda {
namespace {

constexpr int64_t kAlign = 256;
/// Of weights; below, decode of 4-bit integers takes 0.4 to 0.8 us longer with additions (20 to 80 MB), above
/// 0.2 to 8 us less (from 155 MB on): docs/kernels_cuda.md.
constexpr int64_t kManyBytes = int64_t{128} << 20;
/// Token rows may take this much without costing ring slots.
constexpr int64_t kEasyRows = 64 << 10;
constexpr int64_t kFewestRows = 32 << 10;
/// Tokens an expert, mean, up to which decode may be the faster mode. Integers in groups of 32 take two
/// products there for one of prefill: of few, large experts (mixtral, deepseek-v3 with 32) decode takes 1.01
/// to 1.08 times as long at three tokens and 1.05 to 1.09 at four, of 128 small ones 0.94 and 0.97.
constexpr int64_t kMostMean = 5, kMostMeanOfHalves = 2;

/// Bytes of a token row of `cols` in shared memory: 16 mod 128, so that rows fall on different banks.
int64_t RowStride(int64_t cols, bool group_scales) {
  return cols * 2 + 16 + (group_scales ? RoundUp(cols / 128 * 4, 128) : 0);
}

/// Five slabs a chunk where that leaves no shorter chunk and four would.
int ChooseSlabs(const LayerShape& shape) {
  const ChunkSlabs choice = DecodeChunkSlabs(shape.format);
  const int64_t hidden = shape.hidden_cols() / kFragmentSlab, mid = shape.mid_cols() / kFragmentSlab;
  const auto divides = [&](int slabs) { return hidden % slabs == 0 && mid % slabs == 0; };
  return choice.second != 0 && !divides(choice.first) && divides(choice.second) ? choice.second
                                                                                : choice.first;
}

DecodePlan Unfit(std::string why) {
  DecodePlan plan;
  plan.why_not = std::move(why);
  return plan;
}

/// Enough for a list in every other CTA.
bool HasManyExperts(const LayerShape& shape, const DeviceLimits& limits) {
  return 2 * shape.num_local_experts >= limits.num_sms;
}

/// Of weights, where each route names an expert of its own as far as there are some.
int64_t BytesToRead(const LayerShape& shape, int64_t routes) {
  const int64_t experts = shape.batched ? shape.num_local_experts : shape.num_experts;
  const int64_t named =
      std::min(routes * shape.num_local_experts / std::max<int64_t>(1, experts), shape.num_local_experts);
  return named * (shape.gate_up_expert_bytes() + shape.down_expert_bytes());
}

/// Lists of at most eight tokens, though more would fit. Where a CTA has about one list, one with more than
/// eight tokens, which takes twice as long to multiply, keeps the whole launch waiting; cut in two it is
/// spread like others. From three tokens an expert on such lists are common enough: 4-bit weights of 128
/// experts, 64 tokens, 2 to 9 % faster (40 tokens 2 % slower, 8 experts 2 % slower, 8-bit weights no
/// difference).
bool WantsShortLists(const LayerShape& shape, int64_t routes, const DeviceLimits& limits) {
  return FragmentTraitsOf(shape.format).code_bits == 4 && !shape.batched && HasManyExperts(shape, limits) &&
         routes >= 3 * shape.num_experts && routes <= kMostMean * shape.num_experts;
}

/// Token rows in shared memory.
struct RowsPlan {
  int64_t bytes = 0, splits = 1, list_tokens = 0;
};

RowsPlan PlanRows(const LayerShape& shape, const DecodePlan& plan, int64_t num_tokens, int64_t most_bytes) {
  // Rows of the largest list that the batch is likely to have, and one of zeros.
  const int64_t longest_list = 8 * plan.token_tile;
  const int64_t rows = std::min(longest_list, std::max<int64_t>(num_tokens, 1)) + 1;
  const int64_t row = RowStride(shape.hidden_cols(), shape.group_scales);
  const int64_t chunks = CeilDiv(shape.mid_cols() / kFragmentSlab, plan.slabs);
  const auto split_row = [&](int64_t splits) {
    const int64_t cols =
        splits == 1 ? shape.mid_cols() : CeilDiv(chunks, splits) * plan.slabs * kFragmentSlab;
    return RowStride(cols, shape.group_scales);
  };
  RowsPlan result;
  result.bytes = std::min(rows * row, std::max<int64_t>(most_bytes, 0));
  int64_t& splits = result.splits;
  while (splits < chunks && (split_row(splits) * rows > std::max(result.bytes, kEasyRows) ||
                             (splits - 1) * CeilDiv(chunks, splits) >= chunks)) {
    ++splits;
  }
  if (num_tokens == 1) {  // several experts of the one token at a time
    result.bytes = std::max(result.bytes, std::min(9 * split_row(splits), kEasyRows));
  }
  result.bytes = std::max({result.bytes, split_row(splits) * rows, kFewestRows});
  result.bytes = std::min(RoundUp(result.bytes, 128), most_bytes);
  result.list_tokens = std::min(longest_list, result.bytes / std::max(row, split_row(splits)) - 1);
  return result;
}

}  // namespace

DecodePlan PlanDecode(const LayerShape& shape, int64_t num_tokens, MidKind mid, const DeviceLimits& limits) {
  const int64_t routes = num_tokens * (shape.batched ? 1 : shape.top_k);
  if (routes > kMaxRoutes) {
    return Unfit(fmt::format("{} routes; the sort of the decode kernel holds {}", routes, kMaxRoutes));
  }
  if (shape.num_local_experts > kMaxExperts) {
    return Unfit(fmt::format("{} local experts; {} at most", shape.num_local_experts, kMaxExperts));
  }
  const FragmentTraits traits = FragmentTraitsOf(shape.format);
  if (shape.group_scales && (traits.group != 128 || traits.code_bits != 8)) {
    return Unfit(fmt::format("activation scales of groups of 128 need 8-bit weights of groups of 128, not {}",
                             traits.name));
  }
  DecodePlan plan;
  plan.slabs = ChooseSlabs(shape);
  plan.grid = limits.num_sms;
  const int64_t chunk_bytes = int64_t{plan.slabs} / traits.unit_slabs() * traits.unit_bytes();
  const auto shared = [&](int64_t slots, int64_t rows_bytes) -> int64_t {
    return MakeDecodeShared(static_cast<int>(slots), static_cast<int>(rows_bytes),
                            static_cast<int>(plan.tokens_bytes), static_cast<int>(routes),
                            static_cast<int>(shape.num_local_experts), static_cast<int>(chunk_bytes),
                            plan.token_tile)
        .bytes;
  };
  const int64_t most = limits.shared_memory_per_block;
  const auto most_rows = [&] { return (most - shared(2, 0)) / 128 * 128; };
  plan.token_tile = num_tokens <= 8 || WantsShortLists(shape, routes, limits) ? 1 : 2;
  RowsPlan rows = PlanRows(shape, plan, num_tokens, most_rows());
  if (plan.token_tile == 2 && rows.list_tokens <= 8) {  // the smaller tile leaves more memory for rows
    plan.token_tile = 1;
    rows = PlanRows(shape, plan, num_tokens, most_rows());
  }
  const int64_t need = rows.bytes, splits = rows.splits;
  plan.rows_bytes = need;
  plan.splits = static_cast<int>(splits);
  plan.list_tokens = static_cast<int>(rows.list_tokens);
  if (plan.list_tokens < 1) {
    return Unfit(
        fmt::format("a token row of {} bytes beside the weight rings; {} bytes of shared memory are left",
                    RowStride(shape.hidden_cols(), shape.group_scales), most_rows()));
  }
  // A CTA's share of the lists, each cut at both ends, must fit its table of segments.
  if (CeilDiv(routes * splits, plan.grid) + 2 > kMaxSegments) {
    return Unfit(fmt::format("{} routes in {} splits on {} SMs; {} segments an SM at most", routes, splits,
                             plan.grid, kMaxSegments));
  }
  const int64_t work = routes * splits * std::max(shape.gate_up_blocks(), shape.down_blocks());
  if (work >= (int64_t{1} << 24) || work * plan.grid >= (int64_t{1} << 31) ||
      shape.gate_up_blocks() * CeilDiv(shape.hidden_cols() / kFragmentSlab, plan.slabs) >=
          (int64_t{1} << 20)) {
    return Unfit(fmt::format("{} row blocks are beyond the index range of the kernel", work));
  }
  const int64_t slots = (most - shared(0, need)) / (kDecodeWarps * (chunk_bytes + 8));
  plan.slots =
      static_cast<int>(std::min<int64_t>(slots, 2));  // a third only lengthens queues: docs/kernels_cuda.md
  while (plan.slots > 0 && shared(plan.slots, need) > most) {
    --plan.slots;
  }
  if (plan.slots < 2) {
    return Unfit(fmt::format("two weight slots a warp need {} bytes of shared memory, the device has {}",
                             shared(2, need), most));
  }
  plan.many_bytes = BytesToRead(shape, routes) >= kManyBytes;
  // Operands are made for the lists of a CTA alone, but of tokens that it asked for before it had lists.
  plan.makes_operands = mid != MidKind::kRounded;
  const int64_t tokens_bytes = RoundUp(num_tokens * shape.hidden * 2, 128);
  if (plan.makes_operands && !shape.batched && tokens_bytes <= kEasyRows &&
      shared(plan.slots, need) + tokens_bytes <= most) {
    plan.tokens_bytes = tokens_bytes;
  }
  plan.shared_bytes = shared(plan.slots, need);
  plan.by_token = !plan.makes_operands && !shape.batched &&
                  (num_tokens + 1) * RowStride(shape.hidden_cols(), shape.group_scales) <= need;

  // One scale over the call wants every list first, and counters say when they are there.
  plan.tagged_mid = mid != MidKind::kQuantizedByBatch && routes <= kTaggedRoutes &&
                    routes * shape.mid_cols() <= kTaggedElements;
  const int64_t mid_bytes = plan.makes_operands ? 4 : 2;
  plan.scratch_bytes = plan.tagged_mid ? 0 : RoundUp(routes * shape.mid_cols() * mid_bytes, kAlign);
  plan.tagged_offset = RoundUp(kCounterBytes, kAlign);
  const int64_t tagged_bytes =
      mid == MidKind::kQuantizedByBatch
          ? 0
          : std::min(kTaggedRoutes * shape.mid_cols(), kTaggedElements) * 2 * mid_bytes;
  plan.partial_offset = plan.tagged_offset + RoundUp(tagged_bytes, kAlign);
  plan.counter_bytes = plan.partial_offset + RoundUp(routes * splits * shape.down_rows() * 4, kAlign);
  plan.fits = true;
  return plan;
}

ExecutionMode ChooseMode(const LayerShape& shape, int64_t num_tokens, MidKind mid,
                         const DeviceLimits& limits) {
  const DecodePlan decode = PlanDecode(shape, num_tokens, mid, limits);
  if (!decode.fits) {
    return ExecutionMode::kPrefill;
  }
  const int64_t routes = num_tokens * (shape.batched ? 1 : shape.top_k);
  const int64_t experts = shape.batched ? shape.num_local_experts : shape.num_experts;
  // Codes on the 8-bit units, at two tokens an expert, mean: decode takes 1.02 to 1.06 times as long where
  // experts are large (deepseek-v3, mixtral), 0.95 to 1.1 times elsewhere.
  constexpr int64_t kFewestCodeRoutes = 256;
  // Blocks of 128 x 128: decode reads at 93 to 96 % of prefill's rate, whose other launches take some 8 us
  // more. That is even where 110 us of weights are read; of fewer than eight experts tiles do not fill the
  // card.
  constexpr int64_t kFewestBlockRoutes = 8, kFewestBlockBytes = int64_t{512} << 20;
  const bool blocks = shape.format == FragmentFormat::kFp8Block && routes >= kFewestBlockRoutes &&
                      BytesToRead(shape, routes) >= kFewestBlockBytes;
  if (PlanPrefill(shape, num_tokens, mid, limits).codes &&
      (routes >= kFewestCodeRoutes || routes >= 2 * experts || blocks)) {
    return ExecutionMode::kPrefill;
  }
  // Both read the weights once as long as no expert has more tokens than a list of decode holds; with a list
  // more its weights are read again. At a mean of half a list that is 1 to 2 % of the weights, at a mean of
  // six for lists of eight 15 %. Above five tokens a mean, lists of sixteen lose by their arithmetic instead.
  // Measured by bench/cuda/mode_bench: docs/kernels_cuda.md.
  const bool one_list = num_tokens <= std::min(decode.list_tokens, 8);
  const FragmentTraits traits = FragmentTraitsOf(shape.format);
  const bool halves = traits.integer() && traits.group == 32 && !HasManyExperts(shape, limits);
  const int64_t most_mean = halves ? kMostMeanOfHalves : kMostMean;
  const bool few = 2 * routes <= std::min<int64_t>(2 * most_mean, decode.list_tokens) * experts;
  return one_list || few ? ExecutionMode::kDecode : ExecutionMode::kPrefill;
}

}  // namespace fusedmoe::cuda
