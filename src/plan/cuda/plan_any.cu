#include "plan/cuda/plan_job.h"

namespace weft {

WEFT_PLAN_JOB(RegularRuns, RegularRuns)

}  // namespace weft
