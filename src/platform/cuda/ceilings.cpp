#include <fusedmoe/probe.hpp>

#include "platform/cuda/probe.hpp"

namespace fusedmoe {

Result<CardCeilings> MeasureCard() {
  CardCeilings ceilings;
  FMOE_ASSIGN_OR_RETURN(ceilings.read_bytes, cuda::MeasureReadBandwidth());
  FMOE_ASSIGN_OR_RETURN(ceilings.bf16_operations, cuda::MeasureBf16Peak());
  FMOE_ASSIGN_OR_RETURN(ceilings.upload_bytes, cuda::MeasureUploadBandwidth());
  return ceilings;
}

}  // namespace fusedmoe
