#include "jobs/convert/other_modules.hpp"

#include <algorithm>
#include <cstring>

namespace fusedmoe::jobs {
namespace {

using checkpoint::LinearFormat;
using checkpoint::Packing;

// Rows and columns from the codes.
void SizeOf(const LinearFormat& format, const TensorInfo& codes, OtherModule& module) {
  const Shape& shape = codes.shape;
  const auto fields = [&](int64_t words) { return words * 32 / std::max(format.bits, 1); };
  module.rows = shape[0];
  module.cols = shape[1];
  switch (format.packing) {
    case Packing::kDirect:
      // Floats below a byte are packed; integers of 4 bits and less may come one a byte.
      if (DTypeBits(codes.dtype) == 8 && (codes.dtype == DType::kU8 || format.bits == 0)) {
        module.cols = shape[1] * 8 / DTypeBits(format.weight.element);
      }
      return;
    case Packing::kBits:
      module.cols = fields(shape[1]);
      return;
    case Packing::kGptq:
      module.rows = shape[1];
      module.cols = fields(shape[0]);
      return;
    case Packing::kAwq:
      module.rows = fields(shape[1]);
      module.cols = shape[0];
      return;
    case Packing::kRowPairs:
      module.rows *= 2;
      return;
  }
}

// The columns where the last word of a row is not full: only the tensor of the shape says how many there are.
Result<int64_t> ColumnsByShape(const checkpoint::TensorStore& store, const std::string& name,
                               int64_t columns) {
  FMOE_ASSIGN_OR_RETURN(const Tensor shape, store.Load(name));
  if (shape.dtype() != DType::kI64 || shape.shape().count() != 2) {
    return columns;  // its reader says what is wrong
  }
  int64_t said = 0;
  std::memcpy(&said, shape.view().data() + sizeof(said), sizeof(said));
  return said < columns && said > columns - 32 ? said : columns;
}

}  // namespace

Result<std::vector<OtherModule>> FindOtherModules(const checkpoint::LayerContext& any_layer,
                                                  const std::vector<CopiedTensor>& copied) {
  std::vector<OtherModule> modules;
  for (const CopiedTensor& tensor : copied) {
    const TensorInfo& spec = *tensor.info;
    if (spec.shape.rank() != 2) {
      continue;
    }
    for (const std::string_view suffix : {".weight_packed", ".qweight", ".weight"}) {
      if (!spec.name.ends_with(suffix)) {
        continue;
      }
      OtherModule module;
      module.module = spec.name.substr(0, spec.name.size() - suffix.size());
      module.target = tensor.name.substr(0, tensor.name.size() - suffix.size());
      auto format = FormatAt(*any_layer.store, *any_layer.rules, module.module, ".weight");
      if (!format.ok() || !format->quantized() || format->codes != suffix) {
        break;  // not quantized, or something that only its own layer knows how to read
      }
      if (!format->scale.empty() && !any_layer.store->Has(module.module + std::string(format->scale))) {
        break;
      }
      if (any_layer.rules->producer == "modelopt" && !format->input_scale.empty() &&
          !any_layer.store->Has(module.module + std::string(format->input_scale))) {
        format->LeaveInputsAlone();  // as its preset does
      }
      SizeOf(*format, spec, module);
      const std::string shape = module.module + std::string(format->shape);
      if (!format->shape.empty() && any_layer.store->Has(shape)) {
        FMOE_ASSIGN_OR_RETURN(module.cols, ColumnsByShape(*any_layer.store, shape, module.cols));
      }
      FMOE_ASSIGN_OR_RETURN(module.scheme, SchemeOf(*format));
      for (const std::string_view part : format->Suffixes()) {
        if (!part.empty()) {
          module.tensors.insert(module.module + std::string(part));
        }
      }
      module.tensors.insert(module.module + ".g_idx");
      module.format = *std::move(format);
      modules.push_back(std::move(module));
      break;
    }
  }
  std::sort(modules.begin(), modules.end(),
            [](const OtherModule& a, const OtherModule& b) { return a.module < b.module; });
  return modules;
}

}  // namespace fusedmoe::jobs
