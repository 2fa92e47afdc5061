#include "jobs/verify/measured.hpp"

#include <algorithm>
#include <cmath>

#include "jobs/verify/distance.hpp"
#include "moe/backend.hpp"
#include "moe/experts.hpp"
#include "numerics/row_math.hpp"
#include "quant/activation_quantizer.hpp"

namespace fusedmoe::verify {
namespace {

/// The rows between the GEMMs, before they are quantized, [slots, intermediate], that the reference's last
/// forward has left in its workspace; null where it books none.
const float* MiddleRows(const Runner& reference) {
  const std::vector<WorkspaceBook::Entry>& entries = reference.layer->plan().workspace;
  const auto found = std::find_if(entries.begin(), entries.end(), [](const WorkspaceBook::Entry& entry) {
    return entry.name == kReferenceMidEntry;
  });
  return found == entries.end() ? nullptr : reference.workspace.Get<float>(found->slot);
}

/// The peaks of rows that are quantized in groups of so many columns, in units of their root mean square.
void MeasurePeaks(const float* rows, TensorView ids, int64_t columns, const ActivationFormat& format,
                  ComparedValues& values) {
  const int64_t group = std::min(GroupColumns(format, columns), columns);
  double squares = 0, group_squares = 0, largest = 0, count = 0;
  for (int64_t slot = 0; slot < ids.count(); ++slot) {
    const float* row = rows + slot * columns;
    if (ids.as<int32_t>()[slot] < 0 || !std::isfinite(RowAmax(row, columns))) {
      continue;
    }
    squares += DotRows(row, row, columns);
    count += static_cast<double>(columns);
    for (int64_t begin = 0; begin < columns; begin += group) {
      const int64_t length = std::min(group, columns - begin);
      const double amax = RowAmax(row + begin, length);
      group_squares += amax * amax * static_cast<double>(length);
      largest = std::max(largest, amax);
    }
  }
  if (squares > 0) {
    values.peak = largest / std::sqrt(squares / count);
    values.group_peak = IsPerTensor(format) ? *values.peak : std::sqrt(group_squares / squares);
  }
}

}  // namespace

Result<ComparedValues> MeasureValues(const MoeLayer& judged, const Runner& reference, const LayerLoader& load,
                                     LayerOptions reference_options, const ReferenceBatch& batch) {
  ComparedValues values;
  const ActivationMode mode = judged.plan().activation;
  const bool a8 = mode == ActivationMode::kA8 && !judged.scheme().activation.quantized();
  const ActivationFormat format = a8 ? A8Format() : judged.scheme().activation;
  const float* middle = MiddleRows(reference);
  if (middle != nullptr && format.quantized() && mode != ActivationMode::kWeightOnly) {
    MeasurePeaks(middle, batch.ids, reference.layer->config().intermediate, format, values);
  }
  if (a8 && !reference.layer->scheme().activation.quantized()) {
    reference_options.activation = ActivationMode::kA8;
    FMOE_ASSIGN_OR_RETURN(const Runner rounding, Runner::Load(load, reference_options));
    FMOE_ASSIGN_OR_RETURN(const Tensor rounded,
                          rounding.Run(batch.hidden, batch.ids, batch.weights, DType::kF32));
    Distance distance;
    for (int64_t i = 0; i < batch.expected.count(); ++i) {
      distance.Take(rounded.view().as<float>()[i], batch.expected.as<float>()[i]);
    }
    if (const double change = distance.relative(); std::isfinite(change)) {
      values.a8 = change;
    }
  }
  return values;
}

}  // namespace fusedmoe::verify
