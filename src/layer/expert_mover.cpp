#include "layer/expert_mover.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "core/checked_math.hpp"
#include "parallel/agreement.hpp"
#include "weights/canonical.hpp"

namespace fusedmoe {
namespace {

// A blob: this header, then the tensors of gate, up and down, each on 64 bytes; whole rows of kRowBytes, so
// that counts of rows stay far below 2^31.
constexpr int64_t kAlign = 64;
constexpr int64_t kRowBytes = 4096;
struct BlobHeader {
  uint64_t shapes = 0;  ///< digest of everything but values
  uint64_t digest = 0;  ///< of this header with 0 here, and of what follows
  int64_t expert = 0;
  float tensor_scale[3] = {}, input_tensor_scale[3] = {};
  int32_t has_tensor_scale[3] = {}, has_input_tensor_scale[3] = {};
};
static_assert(sizeof(BlobHeader) == 72);
constexpr int64_t kHeaderBytes = 128;

template <typename Expert>
auto MatricesOf(Expert& expert) {
  return std::array{&expert.gate, &expert.up, &expert.down};
}

uint64_t ShapesOf(const CanonicalExpert& expert) {
  std::string text;
  for (const CanonicalMatrix* matrix : MatricesOf(expert)) {
    text += fmt::format("{} {} {} {};", matrix->rows, matrix->cols, matrix->scale_row_offset,
                        matrix->scale_col_offset);
    for (const auto& [name, tensor] : kCanonicalTensors) {
      const TensorView& view = (matrix->*tensor).view();
      text += view.empty() ? "-;" : fmt::format("{} {};", DTypeName(view.dtype()), view.shape().ToString());
    }
  }
  return Fingerprint(text, 0);
}

int64_t BlobBytes(const CanonicalExpert& expert) {
  int64_t bytes = kHeaderBytes;
  for (const CanonicalMatrix* matrix : MatricesOf(expert)) {
    for (const auto& [name, tensor] : kCanonicalTensors) {
      const TensorView& view = (matrix->*tensor).view();
      bytes += view.empty() ? 0 : RoundUp(view.total_bytes(), kAlign);
    }
  }
  return RoundUp(bytes, kRowBytes);
}

void CopyDense(const TensorView& view, std::byte* target) {
  if (view.dense() || view.rank() < 2) {
    std::memcpy(target, view.data(), static_cast<size_t>(view.total_bytes()));
    return;
  }
  const int64_t bytes = view.total_bytes() / view.dim(0);
  for (int64_t row = 0; row < view.dim(0); ++row) {
    std::memcpy(target + row * bytes, view.data() + row * view.stride_bytes(0), static_cast<size_t>(bytes));
  }
}

uint64_t SealOf(const std::byte* blob, int64_t bytes, BlobHeader header) {
  header.digest = 0;
  return Digest(blob + kHeaderBytes, bytes - kHeaderBytes, Fingerprint(&header, sizeof(header)));
}

/// The experts of a rank after moves: one Place for each, however often it has moved.
struct MovedExperts {
  struct Place {
    int64_t index = -1;  ///< in `first`; or
    std::shared_ptr<const CanonicalExpert> arrived;
  };
  std::function<Result<CanonicalExpert>(int64_t)> first;  ///< of the source that the layer was made with
  std::vector<Place> places;

  Result<CanonicalExpert> operator()(int64_t index) const {
    const Place& place = places[static_cast<size_t>(index)];
    return place.arrived != nullptr ? Result<CanonicalExpert>(*place.arrived) : first(place.index);
  }
};

int64_t IndexOf(const std::vector<int64_t>& experts, int64_t expert) {
  const auto found = std::find(experts.begin(), experts.end(), expert);
  return found == experts.end() ? -1 : found - experts.begin();
}

}  // namespace

std::vector<ExpertMove> PlanMoves(std::span<const int32_t> before, std::span<const int32_t> after,
                                  int64_t num_ranks) {
  const auto slots = static_cast<int64_t>(before.size()) / num_ranks;
  const auto ranks_with = [&](std::span<const int32_t> map, int32_t expert) {
    std::vector<int32_t> ranks;  // ascending, each once
    for (size_t slot = 0; slot < map.size(); ++slot) {
      const auto rank = static_cast<int32_t>(static_cast<int64_t>(slot) / slots);
      if (map[slot] == expert && (ranks.empty() || ranks.back() != rank)) {
        ranks.push_back(rank);
      }
    }
    return ranks;
  };
  std::vector<int32_t> experts(after.begin(), after.end());
  std::sort(experts.begin(), experts.end());
  experts.erase(std::unique(experts.begin(), experts.end()), experts.end());
  std::map<std::pair<int32_t, int32_t>, int32_t> rounds;
  std::vector<ExpertMove> moves;
  for (const int32_t expert : experts) {
    const std::vector<int32_t> sources = ranks_with(before, expert);
    std::vector<int32_t> targets = ranks_with(after, expert);
    std::erase_if(targets, [&](int32_t rank) {
      return std::find(sources.begin(), sources.end(), rank) != sources.end();
    });
    const size_t share = targets.size() / sources.size();
    for (size_t index = 0; index < targets.size(); ++index) {
      const size_t source = index < share * sources.size() ? index / std::max<size_t>(share, 1)
                                                           : index - share * sources.size();
      const int32_t from = sources[source], to = targets[index];
      moves.push_back({expert, from, to, rounds[{from, to}]++});
    }
  }
  std::stable_sort(moves.begin(), moves.end(),
                   [](const ExpertMove& a, const ExpertMove& b) { return a.round < b.round; });
  return moves;
}

Status ExpertMover::Open(ExpertSource source, std::vector<int64_t> local_experts,
                         std::vector<ExpertMove> moves, Communicator& communicator) {
  source_ = std::move(source);
  local_experts_ = std::move(local_experts);
  moves_ = std::move(moves);
  rank_ = communicator.rank();
  FMOE_ASSIGN_OR_RETURN(model_, source_.load(0));
  blob_bytes_ = BlobBytes(model_);
  int64_t sent = 0, round = -1, in_round = 0;  // distinct experts that leave in one round, at most
  for (const ExpertMove& move : moves_) {
    if (move.to == rank_) {
      received_.push_back(move.expert);
    }
    if (move.from == rank_) {
      in_round = move.round == round ? in_round + 1 : 1;
      round = move.round;
      sent = std::max(sent, in_round);
    }
  }
  const int64_t received = std::max<int64_t>(experts_received(), 1);
  FMOE_ASSIGN_OR_RETURN(receive_, Tensor::Allocate(DType::kU8, {received * blob_bytes_}));
  FMOE_ASSIGN_OR_RETURN(send_, Tensor::Allocate(DType::kU8, {std::max<int64_t>(sent, 1) * blob_bytes_}));
  return Status::Ok();
}

Status ExpertMover::Run(Communicator& communicator) {
  const int32_t rounds = moves_.empty() ? 0 : moves_.back().round + 1;
  for (int32_t round = 0; round < rounds; ++round) {
    FMOE_RETURN_IF_ERROR(RunRound(round, communicator));
  }
  send_ = Tensor();
  for (int64_t arrival = 0; arrival < experts_received(); ++arrival) {
    if (Result<CanonicalExpert> expert = Unpack(receive_, arrival * blob_bytes_);
        !expert.ok() && fault_.ok()) {
      fault_ = std::move(expert).status().WithContext(
          fmt::format("expert {} arrived", received_[static_cast<size_t>(arrival)]));
    }
  }
  return Status::Ok();
}

Status ExpertMover::RunRound(int32_t round, Communicator& communicator) {
  const auto ranks = static_cast<size_t>(communicator.size());
  const int64_t rows = blob_bytes_ / kRowBytes;
  std::vector<int64_t> send(ranks, 0), send_offset(ranks, 0), receive(ranks, 0), receive_offset(ranks, 0);
  std::vector<int32_t> packed;
  std::byte* memory = send_.mutable_view().data();
  int64_t arrival = 0;  // of this rank, over all rounds
  for (const ExpertMove& move : moves_) {
    arrival += move.to == rank_ && move.round < round ? 1 : 0;
    if (move.round != round) {
      continue;
    }
    if (move.from == rank_) {
      auto found = std::find(packed.begin(), packed.end(), move.expert);
      if (found == packed.end()) {
        Pack(move.expert, memory + static_cast<int64_t>(packed.size()) * blob_bytes_);
        packed.push_back(move.expert);
        found = packed.end() - 1;
      }
      send[static_cast<size_t>(move.to)] = rows;
      send_offset[static_cast<size_t>(move.to)] = (found - packed.begin()) * rows;
    }
    if (move.to == rank_) {
      receive[static_cast<size_t>(move.from)] = rows;
      receive_offset[static_cast<size_t>(move.from)] = arrival++ * rows;
    }
  }
  RowExchange exchange;
  exchange.operation = "eplb experts";
  exchange.row_bytes = kRowBytes;
  exchange.send = memory;
  exchange.receive = receive_.mutable_view().data();
  exchange.send_rows = send;
  exchange.send_offsets = send_offset;
  exchange.receive_rows = receive;
  exchange.receive_offsets = receive_offset;
  return communicator.Exchange(exchange);
}

// What cannot be loaded travels as zeros, whose seal is wrong: the receiver notices, this rank knows.
void ExpertMover::Pack(int32_t expert, std::byte* blob) {
  std::memset(blob, 0, static_cast<size_t>(blob_bytes_));
  Result<CanonicalExpert> loaded = source_.load(IndexOf(local_experts_, expert));
  if (loaded.ok() && ShapesOf(*loaded) != ShapesOf(model_)) {
    loaded = Status::System("its tensors have other shapes than those of its neighbours");
  }
  if (!loaded.ok()) {
    fault_ = fault_.ok() ? std::move(loaded).status().WithContext(fmt::format("expert {}", expert)) : fault_;
    return;
  }
  BlobHeader header;
  header.shapes = ShapesOf(*loaded);
  header.expert = expert;
  std::byte* target = blob + kHeaderBytes;
  size_t index = 0;
  for (const CanonicalMatrix* matrix : MatricesOf(*loaded)) {
    header.tensor_scale[index] = matrix->tensor_scale.value_or(0);
    header.has_tensor_scale[index] = matrix->tensor_scale.has_value() ? 1 : 0;
    header.input_tensor_scale[index] = matrix->input_tensor_scale.value_or(0);
    header.has_input_tensor_scale[index++] = matrix->input_tensor_scale.has_value() ? 1 : 0;
    for (const auto& [name, tensor] : kCanonicalTensors) {
      const TensorView& view = (matrix->*tensor).view();
      if (!view.empty()) {
        CopyDense(view, target);
        target += RoundUp(view.total_bytes(), kAlign);
      }
    }
  }
  header.digest = SealOf(blob, blob_bytes_, header);
  std::memcpy(blob, &header, sizeof(header));
}

Result<CanonicalExpert> ExpertMover::Unpack(const Tensor& memory, int64_t offset) const {
  const std::byte* blob = memory.view().data() + offset;
  BlobHeader header;
  std::memcpy(&header, blob, sizeof(header));
  if (header.digest != SealOf(blob, blob_bytes_, header)) {
    return Status::System("damaged: its digest is not that of what was sent");
  }
  if (header.shapes != ShapesOf(model_)) {
    return Status::System("with tensors of other shapes than those of its neighbours");
  }
  CanonicalExpert expert = model_;
  const std::byte* source = blob + kHeaderBytes;
  size_t index = 0;
  for (CanonicalMatrix* matrix : MatricesOf(expert)) {
    const auto value = [](bool has, float scale) { return has ? std::optional<float>(scale) : std::nullopt; };
    matrix->tensor_scale = value(header.has_tensor_scale[index] != 0, header.tensor_scale[index]);
    matrix->input_tensor_scale =
        value(header.has_input_tensor_scale[index] != 0, header.input_tensor_scale[index]);
    ++index;
    for (const auto& [name, tensor] : kCanonicalTensors) {
      const TensorView& view = (matrix->*tensor).view();
      if (!view.empty()) {
        const TensorView own(source, view.dtype(), view.shape());
        matrix->*tensor = Tensor::Borrow(own, memory.owner());
        source += RoundUp(own.total_bytes(), kAlign);
      }
    }
  }
  return expert;
}

Result<ExpertSource> ExpertMover::Source(const std::vector<int64_t>& local_experts) const {
  const auto* earlier = source_.load.target<MovedExperts>();
  MovedExperts moved;
  moved.first = earlier != nullptr ? earlier->first : source_.load;
  for (const int64_t expert : local_experts) {
    MovedExperts::Place place;
    const int64_t old = IndexOf(local_experts_, expert), arrival = IndexOf(received_, expert);
    if (old >= 0 && earlier != nullptr) {
      place = earlier->places[static_cast<size_t>(old)];
    } else if (old >= 0) {
      place.index = old;
    } else if (arrival >= 0) {
      // In memory of its own, which goes when it leaves.
      FMOE_ASSIGN_OR_RETURN(Tensor blob, Tensor::Allocate(DType::kU8, {blob_bytes_}));
      std::memcpy(blob.mutable_view().data(), receive_.view().data() + arrival * blob_bytes_,
                  static_cast<size_t>(blob_bytes_));
      FMOE_ASSIGN_OR_RETURN(CanonicalExpert arrived, Unpack(blob, 0));
      place.arrived = std::make_shared<const CanonicalExpert>(std::move(arrived));
    } else {
      return Status::System(fmt::format("expert {} was not sent to this rank", expert));
    }
    moved.places.push_back(std::move(place));
  }
  ExpertSource next = source_;
  next.num_local_experts = static_cast<int64_t>(local_experts.size());
  next.load = std::move(moved);
  return next;
}

}  // namespace fusedmoe
