// Calls whose K and V Python makes of a source.
#pragma once

#include "attention.h"
#include "module.h"

namespace weft::python {

void bind_source(nb::class_<HeldExecutor>& executor);

}  // namespace weft::python
