#include "weft/error.h"

#include <utility>

namespace weft {

Error::Error(std::string problem, std::string remedy)
    : std::runtime_error(problem + "; " + remedy), problem_(std::move(problem)), remedy_(std::move(remedy)) {}

Error::~Error() = default;

}  // namespace weft
