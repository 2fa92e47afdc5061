#include "routing/permutation.hpp"

#include "support/golden.hpp"

namespace fusedmoe::golden {
namespace {

std::vector<int32_t> Ids(const GoldenCase& golden_case, const char* name) {
  if (!golden_case.Has(name)) {
    return {};
  }
  const std::vector<int64_t> wide = golden_case.Integers(name);
  return {wide.begin(), wide.end()};
}

int64_t Parameter(const GoldenCase& golden_case, const char* name) {
  return golden_case.parameters().at(name).get<int64_t>();
}

/// Compares the beginning of an array; what stands behind the padded total is not compared.
template <typename T>
Outcome CompareHead(const GoldenCase& golden_case, const char* name, const std::vector<T>& produced) {
  std::vector<int64_t> head(produced.begin(), produced.end());
  const auto expected = static_cast<size_t>(golden_case.Input(name).count());
  if (head.size() < expected) {
    return std::string(name) + " is too short";
  }
  head.resize(expected);
  return golden_case.CompareIntegers(name, head);
}

Outcome CompareAligned(const GoldenCase& golden_case, const Result<int64_t>& padded,
                       const std::vector<int32_t>& slots, const std::vector<int32_t>& blocks) {
  if (!padded.ok()) {
    return padded.status().ToString();
  }
  return FirstOf({golden_case.CompareIntegers("num_tokens_post_pad", {*padded}),
                  CompareHead(golden_case, "sorted_slots", slots),
                  CompareHead(golden_case, "block_experts", blocks)});
}

Outcome RunAlign(const GoldenCase& golden_case) {
  const auto& parameters = golden_case.parameters();
  const std::vector<int32_t> ids = Ids(golden_case, "topk_ids");
  const int64_t experts = Parameter(golden_case, "experts");
  const int64_t block = Parameter(golden_case, "block");
  const int64_t room = MaxAlignedSlots(static_cast<int64_t>(ids.size()), experts, block,
                                       parameters.value("pad_sorted_ids", false));
  const int64_t num_blocks = (room + block - 1) / block;
  if (parameters.value("allocated_slots", room) != room ||
      parameters.value("allocated_blocks", num_blocks) != num_blocks) {
    return "room for " + std::to_string(room) + " slots, " + std::to_string(num_blocks) + " blocks";
  }
  std::vector<int32_t> slots(static_cast<size_t>(room)), blocks(static_cast<size_t>(num_blocks));
  std::vector<int32_t> scratch(static_cast<size_t>(experts + 1));
  const NonLocal non_local =
      parameters.value("ignore_invalid_experts", false) ? NonLocal::kDrop : NonLocal::kMark;
  const auto padded =
      AlignBlockSize(ids, experts, block, Ids(golden_case, "expert_map"), non_local, slots, blocks, scratch);
  return CompareAligned(golden_case, padded, slots, blocks);
}

Outcome RunAlignBatched(const GoldenCase& golden_case) {
  const std::vector<int32_t> counts = Ids(golden_case, "expert_counts");
  std::vector<int32_t> slots(static_cast<size_t>(golden_case.Input("sorted_slots").count()));
  std::vector<int32_t> blocks(static_cast<size_t>(golden_case.Input("block_experts").count()));
  const auto padded = AlignBatchedBlockSize(counts, Parameter(golden_case, "max_tokens"),
                                            Parameter(golden_case, "block"), slots, blocks);
  return CompareAligned(golden_case, padded, slots, blocks);
}

Outcome RunCount(const GoldenCase& golden_case) {
  std::vector<int32_t> counts(static_cast<size_t>(golden_case.Input("counts").count()));
  CountExpertTokens(Ids(golden_case, "topk_ids"), Ids(golden_case, "expert_map"), counts);
  return golden_case.CompareIntegers("counts", {counts.begin(), counts.end()});
}

Outcome RunPermute(const GoldenCase& golden_case) {
  const std::vector<int32_t> ids = Ids(golden_case, "topk_ids");
  const int64_t experts = Parameter(golden_case, "experts");
  const int64_t top_k = Parameter(golden_case, "top_k");
  std::vector<int64_t> first(static_cast<size_t>(Parameter(golden_case, "local_experts") + 1));
  std::vector<int32_t> slot_to_row(ids.size()), row_to_slot(ids.size());
  std::vector<int32_t> scratch(static_cast<size_t>(2 * experts + 1));
  const auto num_rows = MakePermutation(ids, experts, Ids(golden_case, "expert_map"),
                                        {first, slot_to_row, row_to_slot}, scratch);
  if (!num_rows.ok()) {
    return num_rows.status().ToString();
  }
  const TensorView hidden = golden_case.Input("hidden");
  auto rows = Tensor::Allocate(hidden.dtype(), {*num_rows, hidden.dim(1)});
  auto output = Tensor::Allocate(DType::kF32, {hidden.dim(0), hidden.dim(1)});
  if (!rows.ok() || !output.ok()) {
    return "no memory";
  }
  const std::vector<float> weights = golden_case.Floats("topk_weights");
  for (const Status& status : {PermuteRows(hidden, top_k, row_to_slot, *num_rows, rows->mutable_view()),
                               UnpermuteRows(golden_case.Input("expert_rows"), top_k, slot_to_row, *num_rows,
                                             weights.data(), output->mutable_view())}) {
    if (!status.ok()) {
      return status.ToString();
    }
  }
  return FirstOf({golden_case.CompareIntegers("expert_first_row", first),
                  golden_case.CompareIntegers("slot_to_row", {slot_to_row.begin(), slot_to_row.end()}),
                  golden_case.CompareIntegers("row_to_slot", {row_to_slot.begin(), row_to_slot.end()}),
                  golden_case.Compare("rows", rows->view()),
                  golden_case.Compare("unpermuted", output->view())});
}

}  // namespace

Outcome RunPermutation(const GoldenCase& golden_case) {
  const std::string& name = golden_case.name();
  return name.starts_with("align_batched") ? RunAlignBatched(golden_case)
         : name.starts_with("align")       ? RunAlign(golden_case)
         : name.starts_with("count")       ? RunCount(golden_case)
         : name.starts_with("permute")     ? RunPermute(golden_case)
                                           : Outcome("unknown operation '" + name + "'");
}

}  // namespace fusedmoe::golden
