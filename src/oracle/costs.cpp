#include "oracle/costs.hpp"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "core/checked_math.hpp"
#include "moe/cost.hpp"
#include "parallel/card_gather.hpp"
#include "quant/activation_quantizer.hpp"

namespace fusedmoe {
namespace {

/// Tokens whose routes this rank may have to compute: under data and context parallelism every group brings
/// its own.
int64_t TokensSeen(const MoeConfig& config, int64_t tokens) {
  return tokens * std::max<int64_t>(config.parallel.dp_size * config.parallel.pcp_size, 1);
}

/// Projections that read hidden states: two when gated.
int64_t UpRows(const MoeConfig& config) {
  return config.intermediate * (config.activation.gated() ? 2 : 1);
}

struct Rate {
  double tera = 0;
  std::string_view unit;
};

/// The rate at which the products of a scheme can be formed: that of the wider operand, or of the next wider
/// format that the processor multiplies.
Rate RateOf(const Question& question, ActivationMode activation) {
  const Platform& platform = question.platform;
  const Rate f16{platform.f16_tflops, "TFLOP/s f16"};
  if (activation == ActivationMode::kA8) {
    return platform.int8_tops > 0 ? Rate{platform.int8_tops, "TOP/s int8"} : f16;
  }
  if (activation == ActivationMode::kWeightOnly) {
    return f16;
  }
  const Rate fp8 = platform.fp8_tflops > 0 ? Rate{platform.fp8_tflops, "TFLOP/s fp8"} : f16;
  switch (question.activation) {
    case ActivationKey::kNone:
    case ActivationKey::kOther:
      return f16;
    case ActivationKey::kInt8Tensor:
    case ActivationKey::kInt8Token:
    case ActivationKey::kInt8Group:
      return platform.int8_tops > 0 ? Rate{platform.int8_tops, "TOP/s int8"} : f16;
    case ActivationKey::kNvfp4:
    case ActivationKey::kMxfp4:
      return platform.fp4_tflops > 0 ? Rate{platform.fp4_tflops, "TFLOP/s fp4"} : f16;
    case ActivationKey::kFp8TensorStatic:
    case ActivationKey::kFp8TensorDynamic:
    case ActivationKey::kFp8Token:
    case ActivationKey::kFp8Group128:
    case ActivationKey::kMxfp6:
    case ActivationKey::kMxfp8:
      return fp8;
  }
  return f16;
}

/// Bytes of one activation row as it travels: codes where the scheme quantizes before the exchange.
int64_t RowBytes(const Question& question) {
  const bool as_codes =
      question.activation != ActivationKey::kNone && question.activation_mode != ActivationMode::kWeightOnly;
  const DType dtype =
      as_codes ? question.scheme.activation.element.value_or(question.config.dtype) : question.config.dtype;
  return PackedBytes(dtype, question.config.hidden);
}

/// What one rank of this build sends to others: rows as they travel, results in fp32, and outputs to the
/// ranks that were given the same tokens. Headers and padding are left out.
int64_t ExchangeBytesHere(const Question& question, int64_t tokens) {
  const MoeConfig& config = question.config;
  const ParallelConfig& parallel = config.parallel;
  const auto ranks = static_cast<double>(NumRanks(parallel));
  const auto groups = static_cast<double>(std::max<int64_t>(1, parallel.dp_size * parallel.pcp_size));
  const double sharing =
      parallel.sp_size > 1 ? 1 : std::max(1.0, ranks / groups);  // ranks with the same tokens
  const double share = static_cast<double>(tokens) / sharing;
  const auto top_k = static_cast<double>(config.top_k());
  const ActivationFormat& format = question.scheme.activation;
  const bool codes = format.quantized() && !format.static_tensor_scale &&
                     question.activation_mode != ActivationMode::kWeightOnly;
  const int64_t values = codes ? CodeRowBytes(format, config.hidden) + ScaleRowBytes(format, config.hidden)
                               : PackedBytes(config.dtype, config.hidden);
  const double slots = top_k * (ranks - 1) / ranks;  // of a token, on other ranks
  const double met = (ranks - 1) * (1 - std::pow((ranks - 1) / ranks, top_k));
  double out = ranks - 1, back = parallel.use_ep ? met : ranks - 1, ids = top_k;
  if (WireOf(parallel) == WireProtocol::kExpertRows) {
    out = back = slots;
    ids = 1;
  } else if (WireOf(parallel) == WireProtocol::kRankRows) {
    out = met;
  }
  if (question.determinism == Determinism::kRankInvariant) {
    back = slots;
  }
  const auto hidden = static_cast<double>(config.hidden);
  return static_cast<int64_t>(
      share * (out * (static_cast<double>(values) + 8 * ids) + back * 4 * hidden +
               (sharing - 1) * static_cast<double>(PackedBytes(config.dtype, config.hidden))));
}

/// The same on cards: plain rows to all ranks that have not got them, a partial sum of every row back.
int64_t ExchangeBytesOnCards(const Question& question, int64_t tokens) {
  const MoeConfig& config = question.config;
  const ParallelConfig& parallel = config.parallel;
  const int64_t ranks = NumRanks(parallel);
  const int64_t groups = std::max<int64_t>(1, parallel.dp_size * parallel.pcp_size);
  const int64_t sharing = parallel.sp_size > 1 ? 1 : std::max<int64_t>(1, ranks / groups);
  const int64_t row = PackedBytes(config.dtype, config.hidden), back = 4 * config.hidden;
  if (sharing == ranks && ReducesInOneStep(ranks, tokens, back)) {
    return (ranks - 1) * tokens * back;
  }
  const int64_t out = sharing == ranks ? 0 : (ranks - 1) * (row + 8 * config.top_k());
  return tokens * (out + (ranks - 1) * back + (sharing - 1) * row) / sharing;
}

/// Rows out and back, of one rank.
int64_t ExchangeBytes(const Question& question, int64_t tokens) {
  const MoeConfig& config = question.config;
  const ParallelConfig& parallel = config.parallel;
  if (question.platform.runs_this_build) {
    if (NumRanks(parallel) == 1) {
      return 0;
    }
    return question.on_card ? ExchangeBytesOnCards(question, tokens) : ExchangeBytesHere(question, tokens);
  }
  const int64_t row_out = RowBytes(question);
  const int64_t row_back = PackedBytes(config.dtype, config.hidden);
  int64_t bytes = 0;
  if (parallel.dp_size > 1) {
    const std::optional<AllToAllBackend> backend = ParseAllToAll(parallel.all2all);
    const WireProtocol wire =
        UseAllToAll(parallel) && backend ? WireProtocolOf(RunsAs(*backend)) : WireProtocol::kGather;
    double copies = static_cast<double>(parallel.dp_size - 1);  // a gather sends every row to every group
    if (wire == WireProtocol::kExpertRows) {
      copies = static_cast<double>(config.top_k()) * static_cast<double>(parallel.ep_size - 1) /
               static_cast<double>(parallel.ep_size);
    } else if (wire == WireProtocol::kRankRows) {
      const double others = static_cast<double>(parallel.ep_size - 1);
      const double missed =
          std::pow(others / static_cast<double>(parallel.ep_size), static_cast<double>(config.top_k()));
      copies = others * (1.0 - missed);  // other ranks that own one of the token's experts
    }
    bytes += static_cast<int64_t>(copies * static_cast<double>(tokens * (row_out + row_back)));
  }
  if (parallel.tp_size > 1) {
    // A ring all-reduce sends 2 (n - 1) / n of the output.
    bytes += 2 * (parallel.tp_size - 1) * tokens * row_back / parallel.tp_size;
  }
  return bytes;
}

}  // namespace

int64_t CanonicalBytes(const Question& question) {
  WeightFormat format = question.scheme.weight;
  format.may_have_zero_point = question.weights.has_zero_points;
  return question.config.num_local_experts * ExpertBytes(question.config, format);
}

Costs EstimateCosts(const Question& question, int64_t tokens, ActivationMode activation, int64_t weight_bytes,
                    int64_t workspace_bytes) {
  const MoeConfig& config = question.config;
  const int64_t expert_bytes = weight_bytes / std::max<int64_t>(config.num_local_experts, 1);
  const int64_t seen = TokensSeen(config, tokens);
  Costs costs;
  costs.active_experts = ExpectedExperts(config, seen);
  costs.weight_bytes = weight_bytes;
  const int64_t row_bytes = PackedBytes(config.dtype, config.hidden);
  costs.read_bytes =
      static_cast<int64_t>(costs.active_experts * static_cast<double>(expert_bytes)) + 2 * tokens * row_bytes;
  costs.flops = ForwardFlops(config, seen);
  costs.workspace_bytes = workspace_bytes;
  costs.exchange_bytes = ExchangeBytes(question, tokens);
  costs.memory_bytes = costs.weight_bytes + workspace_bytes + 2 * tokens * row_bytes;
  const Rate rate = RateOf(question, activation);
  if (question.platform.memory_gbps > 0) {
    costs.read_seconds = static_cast<double>(costs.read_bytes) / (question.platform.memory_gbps * 1e9);
  }
  if (rate.tera > 0) {
    costs.compute_seconds = static_cast<double>(costs.flops) / (rate.tera * 1e12);
  }
  costs.seconds = std::max(costs.read_seconds, costs.compute_seconds);
  if (costs.seconds > 0) {
    costs.rate = costs.read_seconds >= costs.compute_seconds
                     ? fmt::format("{} GB/s", question.platform.memory_gbps)
                     : fmt::format("{} {}", rate.tera, rate.unit);
  }
  return costs;
}

std::vector<WorkspaceBook::Entry> DescribedWorkspace(const Capability& capability, const Question& question,
                                                     int64_t tokens) {
  const MoeConfig& config = question.config;
  const int64_t rows = TokensSeen(config, tokens);
  const int64_t routes = rows * config.top_k();
  const int64_t hidden = config.hidden;
  const int64_t act = config.intermediate;
  const int64_t gate_up = UpRows(config);
  constexpr int64_t kBytes = 2;  // 16-bit intermediates
  WorkspaceBook book;
  const auto buffers = [&](int64_t first, int64_t second, int64_t output) {
    book.Book("gemm2_and_output", std::max(first, output) * kBytes);  // the output reuses the first buffer
    book.Book("gemm1", second * kBytes);
  };
  switch (capability.scratch) {
    case Scratch::kNone:
      break;
    case Scratch::kTriton:
      buffers(routes * std::max(act, hidden), routes * std::max(gate_up, hidden), rows * hidden);
      break;
    case Scratch::kMarlin:
      buffers(routes * std::max(gate_up, hidden), routes * std::max(gate_up, hidden), rows * hidden);
      break;
    case Scratch::kCutlass:
      buffers(routes * std::max(gate_up, hidden), routes * std::max(act, hidden), rows * hidden);
      break;
    case Scratch::kCutlassFp4:
      buffers(routes * std::max(gate_up, hidden), routes * act, rows * hidden);
      break;
    case Scratch::kDeepGemm: {
      // Every expert's rows start on a multiple of 128.
      constexpr int64_t kAlign = 128;
      const int64_t aligned = CeilDiv(routes + config.num_local_experts * (kAlign - 1), kAlign) * kAlign;
      buffers(aligned * std::max(act, hidden), aligned * std::max(gate_up, hidden), rows * hidden);
      break;
    }
    case Scratch::kOutputOnly:
      book.Book("output", rows * hidden * kBytes);
      break;
    case Scratch::kBatched: {
      const int64_t batch = config.num_local_experts * rows;  // room for all rows in every expert
      buffers(batch * std::max(gate_up, hidden), batch * act, batch * hidden);
      break;
    }
    case Scratch::kOneActivation:
      buffers(rows * hidden, routes * act, rows * hidden);
      break;
  }
  return {book.entries().begin(), book.entries().end()};
}

}  // namespace fusedmoe
