// One function a schedule: adds the plans and steps of its rank.
#pragma once

#include "weft/schedule.h"

namespace weft::schedule {

void all_gather(Schedule& s, const Heads& heads);
void ring(Schedule& s);

}  // namespace weft::schedule
