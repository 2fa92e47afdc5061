#include <fmt/format.h>

#include <algorithm>

#include "core/checked_math.hpp"
#include "experts/cuda/decode/decode_arguments.hpp"

namespace fusedmoe::cuda {
namespace {

constexpr int64_t kAlign = 256;
/// Bytes of weights from which on 4-bit integers are decoded with additions: that takes 0.4 to 0.8 us longer
/// below (20 to 80 MB), and 0.2 to 8 us less above (from 155 MB on): docs/kernels_cuda.md.
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

/// Five slabs a chunk where that leaves no shorter chunk and four would; of two formats as each has them.
void ChooseSlabs(const LayerShape& shape, int (&slabs)[2]) {
  if (shape.own_gate_up) {
    slabs[0] = DecodeChunkSlabs(*shape.own_gate_up).first;
    slabs[1] = DecodeChunkSlabs(shape.format).first;
    return;
  }
  const ChunkSlabs choice = DecodeChunkSlabs(shape.format);
  const int64_t hidden = shape.hidden_cols() / kFragmentSlab, mid = shape.mid_cols() / kFragmentSlab;
  const auto divides = [&](int count) { return hidden % count == 0 && mid % count == 0; };
  const bool second = choice.second != 0 && !divides(choice.first) && divides(choice.second);
  slabs[0] = slabs[1] = second ? choice.second : choice.first;
}

int64_t ChunkBytes(FragmentFormat format, int slabs) {
  const FragmentTraits traits = FragmentTraitsOf(format);
  return int64_t{slabs} / traits.unit_slabs() * traits.unit_bytes();
}

/// Enough for a list in every other CTA.
bool HasManyExperts(const LayerShape& shape, const DeviceLimits& limits) {
  return 2 * shape.num_local_experts >= limits.num_sms;
}

/// Bytes of weights that a call reads, if its routes name different experts as far as there are enough.
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
  return FragmentTraitsOf(shape.gate_up_format()).code_bits == 4 && !shape.batched &&
         HasManyExperts(shape, limits) && routes >= 3 * shape.num_experts &&
         routes <= kMostMean * shape.num_experts;
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
  const int64_t chunks = CeilDiv(shape.mid_cols() / kFragmentSlab, plan.slabs[1]);
  const auto split_row = [&](int64_t splits) {
    const int64_t cols =
        splits == 1 ? shape.mid_cols() : CeilDiv(chunks, splits) * plan.slabs[1] * kFragmentSlab;
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

/// Makes one plan in stages; each says why the call does not fit, or nothing.
class DecodePlanner {
 public:
  DecodePlanner(const LayerShape& shape, int64_t num_tokens, MidKind mid, const DeviceLimits& limits)
      : shape_(shape),
        traits_(FragmentTraitsOf(shape.format)),
        num_tokens_(num_tokens),
        routes_(num_tokens * (shape.batched ? 1 : shape.top_k)),
        mid_(mid),
        limits_(limits) {}

  DecodePlan Plan() {
    for (const auto stage : {&DecodePlanner::PlanTables, &DecodePlanner::PlanTokenRows,
                             &DecodePlanner::PlanSegments, &DecodePlanner::PlanSlots}) {
      if (std::string why = (this->*stage)(); !why.empty()) {
        DecodePlan unfit;
        unfit.why_not = std::move(why);
        return unfit;
      }
    }
    PlanOperands();
    PlanScratch();
    plan_.fits = true;
    return plan_;
  }

 private:
  /// Bytes of shared memory with `slots` weight slots a warp and `rows_bytes` of token rows.
  int64_t SharedBytes(int64_t slots, int64_t rows_bytes) const {
    return MakeDecodeShared(static_cast<int>(slots), static_cast<int>(rows_bytes),
                            static_cast<int>(plan_.tokens_bytes), static_cast<int>(routes_),
                            static_cast<int>(shape_.num_local_experts), static_cast<int>(plan_.slot_bytes),
                            plan_.token_tile)
        .bytes;
  }

  int64_t MostRowsBytes() const { return (limits_.shared_memory_per_block - SharedBytes(2, 0)) / 128 * 128; }

  std::string PlanTables() {
    if (routes_ > kMaxRoutes) {
      return fmt::format("{} routes; the sort of the decode kernel holds {}", routes_, kMaxRoutes);
    }
    if (shape_.num_local_experts > kMaxExperts) {
      return fmt::format("{} local experts; {} at most", shape_.num_local_experts, kMaxExperts);
    }
    if (shape_.group_scales && (traits_.group != 128 || traits_.code_bits != 8)) {
      return fmt::format("activation scales of groups of 128 need 8-bit weights of groups of 128, not {}",
                         traits_.name);
    }
    if (shape_.own_gate_up &&
        (mid_ != MidKind::kRounded || !IsFragmentPair(*shape_.own_gate_up, shape_.format))) {
      return fmt::format("gate and up are {} and down is {}{}; there is no kernel for both",
                         FragmentTraitsOf(*shape_.own_gate_up).name, traits_.name,
                         mid_ != MidKind::kRounded ? ", with quantized activations" : "");
    }
    ChooseSlabs(shape_, plan_.slabs);
    plan_.slot_bytes = std::max(ChunkBytes(shape_.gate_up_format(), plan_.slabs[0]),
                                ChunkBytes(shape_.format, plan_.slabs[1]));
    plan_.grid = limits_.num_sms;
    return {};
  }

  std::string PlanTokenRows() {
    plan_.token_tile = num_tokens_ <= 8 || WantsShortLists(shape_, routes_, limits_) ? 1 : 2;
    RowsPlan rows = PlanRows(shape_, plan_, num_tokens_, MostRowsBytes());
    if (plan_.token_tile == 2 && rows.list_tokens <= 8) {  // the smaller tile leaves more memory for rows
      plan_.token_tile = 1;
      rows = PlanRows(shape_, plan_, num_tokens_, MostRowsBytes());
    }
    plan_.rows_bytes = rows.bytes;
    plan_.splits = static_cast<int>(rows.splits);
    plan_.list_tokens = static_cast<int>(rows.list_tokens);
    if (plan_.list_tokens < 1) {
      return fmt::format(
          "a token row of {} bytes beside the weight rings; {} bytes of shared memory are left",
          RowStride(shape_.hidden_cols(), shape_.group_scales), MostRowsBytes());
    }
    return {};
  }

  /// A CTA's share of the lists, each cut at both ends, must fit its table of segments.
  std::string PlanSegments() {
    const int64_t lists = routes_ * plan_.splits;
    if (CeilDiv(lists, plan_.grid) + 2 > kMaxSegments) {
      return fmt::format("{} routes in {} splits on {} SMs; {} segments an SM at most", routes_, plan_.splits,
                         plan_.grid, kMaxSegments);
    }
    const int64_t work = lists * std::max(shape_.gate_up_blocks(), shape_.down_blocks());
    if (work >= (int64_t{1} << 24) || work * plan_.grid >= (int64_t{1} << 31) ||
        shape_.gate_up_blocks() * CeilDiv(shape_.hidden_cols() / kFragmentSlab, plan_.slabs[0]) >=
            (int64_t{1} << 20)) {
      return fmt::format("{} row blocks are beyond the index range of the kernel", work);
    }
    return {};
  }

  std::string PlanSlots() {
    const int64_t most = limits_.shared_memory_per_block, rows_bytes = plan_.rows_bytes;
    const int64_t slots = (most - SharedBytes(0, rows_bytes)) / (kDecodeWarps * (plan_.slot_bytes + 8));
    // A third only lengthens queues: docs/kernels_cuda.md.
    plan_.slots = static_cast<int>(std::min<int64_t>(slots, 2));
    while (plan_.slots > 0 && SharedBytes(plan_.slots, rows_bytes) > most) {
      --plan_.slots;
    }
    if (plan_.slots < 2) {
      return fmt::format("two weight slots a warp need {} bytes of shared memory, the device has {}",
                         SharedBytes(2, rows_bytes), most);
    }
    plan_.many_bytes = BytesToRead(shape_, routes_) >= kManyBytes;
    return {};
  }

  /// Operands are made for the lists of a CTA alone, but of tokens that it asked for before it had lists.
  void PlanOperands() {
    plan_.makes_operands = mid_ != MidKind::kRounded;
    const int64_t tokens_bytes = RoundUp(num_tokens_ * shape_.hidden * 2, 128);
    if (plan_.makes_operands && !shape_.batched && tokens_bytes <= kEasyRows &&
        SharedBytes(plan_.slots, plan_.rows_bytes) + tokens_bytes <= limits_.shared_memory_per_block) {
      plan_.tokens_bytes = tokens_bytes;
    }
    plan_.shared_bytes = SharedBytes(plan_.slots, plan_.rows_bytes);
    plan_.by_token =
        !plan_.makes_operands && !shape_.batched &&
        (num_tokens_ + 1) * RowStride(shape_.hidden_cols(), shape_.group_scales) <= plan_.rows_bytes;
  }

  /// One scale over the call wants every list first, and counters say when they are there.
  void PlanScratch() {
    const bool by_batch = mid_ == MidKind::kQuantizedByBatch;
    const int64_t elements = routes_ * shape_.mid_cols();
    plan_.tagged_mid = !by_batch && routes_ <= kTaggedRoutes && elements <= kTaggedElements;
    const int64_t mid_bytes = plan_.makes_operands ? 4 : 2;
    plan_.scratch_bytes = plan_.tagged_mid ? 0 : RoundUp(elements * mid_bytes, kAlign);
    plan_.tagged_offset = RoundUp(kCounterBytes, kAlign);
    const int64_t tagged_elements =
        by_batch ? 0 : std::min(kTaggedRoutes * shape_.mid_cols(), kTaggedElements);
    plan_.partial_offset = plan_.tagged_offset + RoundUp(tagged_elements * 2 * mid_bytes, kAlign);
    plan_.counter_bytes =
        plan_.partial_offset + RoundUp(routes_ * plan_.splits * shape_.down_rows() * 4, kAlign);
  }

  const LayerShape& shape_;
  const FragmentTraits traits_;
  const int64_t num_tokens_;
  const int64_t routes_;
  const MidKind mid_;
  const DeviceLimits& limits_;
  DecodePlan plan_;
};

}  // namespace

DecodePlan PlanDecode(const LayerShape& shape, int64_t num_tokens, MidKind mid, const DeviceLimits& limits) {
  return DecodePlanner(shape, num_tokens, mid, limits).Plan();
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
  const bool halves =
      traits.scale == FragmentScale::kF32Zero && traits.group == 32 && !HasManyExperts(shape, limits);
  const int64_t most_mean = halves ? kMostMeanOfHalves : kMostMean;
  const bool few = 2 * routes <= std::min<int64_t>(2 * most_mean, decode.list_tokens) * experts;
  return one_list || few ? ExecutionMode::kDecode : ExecutionMode::kPrefill;
}

}  // namespace fusedmoe::cuda
