// All of Weft.
#pragma once

#include "weft/attention.h"
#include "weft/config.h"
#include "weft/dtype.h"
#include "weft/error.h"
#include "weft/kernel.h"
#include "weft/layout.h"
#include "weft/mask.h"
#include "weft/packing.h"
#include "weft/plan.h"
#include "weft/rows.h"
#include "weft/slice.h"
#include "weft/state.h"
#include "weft/tensor.h"
#include "weft/version.h"
