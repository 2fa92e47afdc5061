#include "experts/cuda/upload/cuda_weights.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#include "core/checked_math.hpp"
#include "experts/cuda/upload/arrange.hpp"
#include "experts/cuda/upload/host_vectors.hpp"
#include "experts/cuda/upload/piece_board.hpp"
#include "platform/cuda/card.hpp"
#include "platform/cuda/upload.hpp"
#include "weights/fragment_stager.hpp"
#include "weights/narrow.hpp"

namespace fusedmoe::cuda {
namespace {

constexpr std::string_view kInputByExpert = "input_by_expert";

/// Pieces of so many bytes, or of the fewest rows that make whole blocks.
constexpr int64_t kPieceBytes = int64_t{1} << 19;
/// More threads only take memory from each other and from the link: 32 of them on a host of 32 cores reach 64
/// to 75 % of the link where 16 reach 75 to 79 (the middle of seven uploads of 350 MB).
constexpr int kMostThreads = 16;

/// Named tensors of the card, those of one Place in one allocation and one copy: each takes 0.1 ms, beside
/// the 7 ms that a layer of 350 MB is on the link.
class Shelf {
 public:
  explicit Shelf(PreparedWeights& prepared) : prepared_(prepared) {}

  /// `values`: of the shape, to stay as they are until Place; null: somebody else writes them. Where they
  /// will stand behind what Place returns.
  int64_t Add(std::string_view name, DType dtype, const Shape& shape, const void* values = nullptr) {
    constexpr int64_t kAlign = 256;
    items_.push_back({name, TensorView(nullptr, dtype, shape), values, bytes_});
    bytes_ = RoundUp(bytes_ + items_.back().sizes.total_bytes(), kAlign);
    return items_.back().offset;
  }
  template <typename T>
  void Add(std::string_view name, const std::vector<T>& values) {
    static_assert(sizeof(T) == 4);
    if (!values.empty()) {
      constexpr DType kDType = std::is_same_v<T, float> ? DType::kF32 : DType::kI32;
      Add(name, kDType, {static_cast<int64_t>(values.size())}, values.data());
    }
  }

  /// At least one tensor was added.
  Result<std::byte*> Place() {
    FMOE_ASSIGN_OR_RETURN(const std::shared_ptr<std::byte> memory,
                          AllocateOnDevice(bytes_, items_.front().name));
    std::vector<std::byte> copied;
    for (const Item& item : items_) {
      const TensorView view(memory.get() + item.offset, item.sizes.dtype(), item.sizes.shape());
      prepared_.tensors.push_back(
          {std::string(item.name), Tensor::Borrow(view, std::shared_ptr<const void>(memory))});
      if (item.values != nullptr) {
        copied.resize(static_cast<size_t>(bytes_));
        std::memcpy(copied.data() + item.offset, item.values, static_cast<size_t>(view.total_bytes()));
      }
    }
    items_.clear();
    bytes_ = 0;
    if (!copied.empty()) {
      FMOE_RETURN_IF_ERROR(
          CopyToDevice(memory.get(), copied.data(), static_cast<int64_t>(copied.size()), nullptr));
      FMOE_RETURN_IF_ERROR(Synchronize(nullptr));
    }
    return memory.get();
  }

 private:
  struct Item {
    std::string_view name;
    TensorView sizes;  ///< no data
    const void* values = nullptr;
    int64_t offset = 0;
  };
  PreparedWeights& prepared_;
  std::vector<Item> items_;
  int64_t bytes_ = 0;
};

Status CheckMemory(const CudaPlan& plan) {
  FMOE_ASSIGN_OR_RETURN(const MemoryFigures figures, ReadMemory());
  const int64_t needed = DeviceWeightBytes(plan);
  if (needed > figures.free_bytes) {
    return Status::System(
        fmt::format("the card has too little memory for the weights: needed {} bytes, free {} of {}", needed,
                    figures.free_bytes, figures.total_bytes));
  }
  return Status::Ok();
}

/// Whether all experts have the same `count` values.
template <typename T>
bool AllEqual(const std::vector<T>& values, int64_t count) {
  for (size_t at = static_cast<size_t>(count); at < values.size(); ++at) {
    if (values[at] != values[at - static_cast<size_t>(count)]) {
      return false;
    }
  }
  return true;
}

/// An expert whose matrices are as the formats of the layout need them.
Result<CanonicalExpert> LoadExpert(const CudaPlan& plan, const ExpertSource& source, int64_t index) {
  FMOE_ASSIGN_OR_RETURN(CanonicalExpert expert, source.load(index));
  for (const auto& [matrix, name, narrow] : {std::tuple(&expert.gate, "gate", plan.narrow_gate_up),
                                             std::tuple(&expert.up, "up", plan.narrow_gate_up),
                                             std::tuple(&expert.down, "down", plan.narrow_down)}) {
    if (narrow) {
      matrix->stored = WithoutLevels(matrix->stored);
      FMOE_RETURN_IF_ERROR(NarrowInPlace(name, *matrix));
    }
  }
  return expert;
}

/// One expert to the card and into the vectors.
class ExpertUpload {
 public:
  ExpertUpload(const CudaPlan& plan, const FragmentSizes& sizes, Uploader& uploader, uint8_t* gate_up,
               uint8_t* down, int64_t piece_bytes, HostVectors& host)
      : plan_(plan),
        sizes_(sizes),
        uploader_(uploader),
        gate_up_(gate_up),
        down_(down),
        piece_bytes_(piece_bytes),
        host_(host) {}

  /// Threads that have nothing else to do take some of the pieces.
  Status Run(const CanonicalExpert& expert, int64_t index, PieceBoard& board) const {
    FMOE_RETURN_IF_ERROR(HostVectors::Check(expert));
    FMOE_ASSIGN_OR_RETURN(const FragmentStager stager, FragmentStager::Create(expert, plan_.spec));
    const std::vector<FragmentPiece> pieces = stager.Cut(piece_bytes_);
    std::vector<std::vector<int64_t>> nan_rows_of(pieces.size());
    FMOE_RETURN_IF_ERROR(board.Run(static_cast<int64_t>(pieces.size()), [&](int64_t piece) -> Status {
      const auto at = static_cast<size_t>(piece);
      return Send(stager, pieces[at], index, nan_rows_of[at]);
    }));
    std::vector<int64_t> nan_rows;
    for (const std::vector<int64_t>& rows : nan_rows_of) {
      nan_rows.insert(nan_rows.end(), rows.begin(), rows.end());
    }
    if (!nan_rows.empty()) {
      host_.has_nan_rows = true;
    }
    FMOE_RETURN_IF_ERROR(stager.Vectors(nan_rows, host_.OutputOf(index)));
    host_.TakeScales(expert, index, stager);
    return Status::Ok();
  }

 private:
  /// Stages a piece; it is copied and arranged behind this call, together with others.
  Status Send(const FragmentStager& stager, const FragmentPiece& piece, int64_t index,
              std::vector<int64_t>& nan_rows) const {
    return uploader_.Send(stager.StagedBytes(piece), [&](std::byte* host, const std::byte* device) {
      stager.Stage(piece, reinterpret_cast<uint8_t*>(host), nan_rows);
      const ArrangeCall call = Arrangement(stager, piece, index, reinterpret_cast<const uint8_t*>(device));
      return [this, call](void* stream, bool more) {
        to_arrange_.push_back(call);
        if (more) {
          return Status::Ok();
        }
        Status status = LaunchArrange(to_arrange_, stream);
        to_arrange_.clear();
        return status;
      };
    });
  }

  ArrangeCall Arrangement(const FragmentStager& stager, const FragmentPiece& piece, int64_t index,
                          const uint8_t* staged) const {
    const bool is_down = piece.part == FragmentPart::kDown;
    ArrangeCall arrange;
    arrange.format = stager.FormatOf(piece);
    arrange.staged = stager.View(piece, staged);
    arrange.blocks = piece.blocks;
    arrange.places = stager.PlacesOf(piece);
    arrange.first_block = piece.first_block;
    arrange.matrix = is_down ? down_ + index * sizes_.down_bytes : gate_up_ + index * sizes_.gate_up_bytes;
    return arrange;
  }

  const CudaPlan& plan_;
  const FragmentSizes& sizes_;
  Uploader& uploader_;
  uint8_t* gate_up_;
  uint8_t* down_;
  int64_t piece_bytes_;
  HostVectors& host_;
  mutable std::vector<ArrangeCall> to_arrange_;  ///< pieces of the copy that is being enqueued
};

/// All experts, each by the thread that comes first; threads for which none is left help the others.
Status UploadAll(const CudaPlan& plan, const ExpertSource& source, const ExpertUpload& upload, int threads,
                 const Executor& executor) {
  std::atomic<int64_t> next = 0;
  std::vector<Status> statuses(static_cast<size_t>(threads));
  PieceBoard board;
  ParallelFor(executor, threads, [&](int64_t thread) {
    Status& status = statuses[static_cast<size_t>(thread)];
    PieceBoard::Owner owner(board);
    for (int64_t index = next++; index < source.num_local_experts; index = next++) {
      Result<CanonicalExpert> expert = LoadExpert(plan, source, index);
      status = expert.ok() ? upload.Run(*expert, index, board) : expert.status();
      if (!status.ok()) {
        status = std::move(status).WithContext(fmt::format("expert {}", index));
        next = source.num_local_experts;  // the others end too
        break;
      }
    }
    owner.LeaveAndHelp();
  });
  for (Status& status : statuses) {
    FMOE_RETURN_IF_ERROR(std::move(status));
  }
  return Status::Ok();
}

const float* Floats(const PreparedWeights& weights, std::string_view name) {
  const Tensor* tensor = weights.Find(name);
  return tensor == nullptr ? nullptr : tensor->view().as<float>();
}

}  // namespace

Result<PreparedWeights> PrepareCudaWeights(const CudaPlan& plan, const ExpertSource& source,
                                           const Executor& executor) {
  FMOE_RETURN_IF_ERROR(CheckCard(HostMachine()));
  FMOE_RETURN_IF_ERROR(CheckMemory(plan));
  const int64_t experts = source.num_local_experts;
  const FragmentSizes sizes =
      FragmentSizesOf(plan.spec, plan.shape.hidden, plan.shape.intermediate, plan.shape.gated());
  PreparedWeights prepared;
  prepared.layout_key = "cuda:" + plan.spec.ToString();
  prepared.recipe = CudaRecipe(plan);
  Shelf shelf(prepared);
  const int64_t gate_up = shelf.Add("gate_up", DType::kU8, {experts, sizes.gate_up_bytes});
  const int64_t down = shelf.Add("down", DType::kU8, {experts, sizes.down_bytes});
  FMOE_ASSIGN_OR_RETURN(std::byte* const placed, shelf.Place());
  auto* const blocks = reinterpret_cast<uint8_t*>(placed);
  HostVectors host(plan, sizes);
  const int64_t piece_bytes = std::max(
      kPieceBytes,
      FragmentStager::FewestBytes(plan.spec, plan.shape.hidden, plan.shape.intermediate, plan.shape.gated()));
  const int threads = std::clamp(executor.num_threads, 1, kMostThreads);
  FMOE_ASSIGN_OR_RETURN(std::unique_ptr<Uploader> uploader, Uploader::Take(threads, piece_bytes));
  const ExpertUpload upload(plan, sizes, *uploader, blocks + gate_up, blocks + down, piece_bytes, host);
  FMOE_RETURN_IF_ERROR(UploadAll(plan, source, upload, threads, executor));
  FMOE_RETURN_IF_ERROR(uploader->Flush());
  if (!plan.spec.row_scale && !host.has_nan_rows) {
    host.gate_up_row.clear();
    host.down_row.clear();
  }
  shelf.Add("gate_up_tensor_scale", host.gate_up_tensor);
  shelf.Add("down_tensor_scale", host.down_tensor);
  shelf.Add("gate_up_row_scale", host.gate_up_row);
  shelf.Add("down_row_scale", host.down_row);
  shelf.Add("gate_up_bias", host.gate_up_bias);
  shelf.Add("down_bias", host.down_bias);
  shelf.Add("input_tensor_scale", host.input_scale);
  shelf.Add("mid_tensor_scale", host.mid_scale);
  shelf.Add("input_smoothing", host.input_smoothing);
  shelf.Add("mid_smoothing", host.mid_smoothing);
  if (std::any_of(host.input_scales_differ.begin(), host.input_scales_differ.end(),
                  [](uint8_t one) { return one != 0; })) {
    prepared.recipe.push_back("max_input_scale()");
  }
  shelf.Add("input_order", host.input_order);
  const float by_expert = 1.0F;
  if (!host.input_smoothing.empty() || !AllEqual(host.input_scale, 1) ||
      !AllEqual(host.input_order, plan.shape.hidden)) {
    shelf.Add(kInputByExpert, DType::kF32, {1}, &by_expert);
  }
  FMOE_RETURN_IF_ERROR(shelf.Place().status());  // while the last copies are on the link
  FMOE_RETURN_IF_ERROR(uploader->Finish());
  Uploader::Keep(std::move(uploader));
  prepared.layout_error = plan.short_scales ? 0x1p-17 : 0.0;
  return prepared;
}

Result<CudaWeights> FindCudaWeights(const CudaPlan& plan, const PreparedWeights& weights) {
  if (weights.layout_key != "cuda:" + plan.spec.ToString()) {
    return Status::Unsupported(fmt::format("CUDA_FUSED reads weights in layout 'cuda:{}', these are in '{}'",
                                           plan.spec.ToString(), weights.layout_key));
  }
  CudaWeights found;
  found.kernels.gate_up.blocks = weights.Find("gate_up")->view().as<uint8_t>();
  found.kernels.down.blocks = weights.Find("down")->view().as<uint8_t>();
  found.kernels.gate_up.tensor_scale = Floats(weights, "gate_up_tensor_scale");
  found.kernels.down.tensor_scale = Floats(weights, "down_tensor_scale");
  found.kernels.gate_up.row_scale = Floats(weights, "gate_up_row_scale");
  found.kernels.down.row_scale = Floats(weights, "down_row_scale");
  found.kernels.gate_up.bias = Floats(weights, "gate_up_bias");
  found.kernels.down.bias = Floats(weights, "down_bias");
  found.kernels.half_scale_is_f16 = plan.spec.half_scale == DType::kF16;
  found.input_scale = Floats(weights, "input_tensor_scale");
  found.mid_scale = Floats(weights, "mid_tensor_scale");
  found.input_smoothing = Floats(weights, "input_smoothing");
  found.mid_smoothing = Floats(weights, "mid_smoothing");
  const Tensor* order = weights.Find("input_order");
  found.input_order = order == nullptr ? nullptr : order->view().as<int32_t>();
  found.input_by_expert = weights.Find(kInputByExpert) != nullptr;
  return found;
}

}  // namespace fusedmoe::cuda
