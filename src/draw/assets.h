// The files of draw/page, which cmake/embed.cmake compiles into the library.
#pragma once

#include <string_view>

namespace weft::draw::assets {

extern const std::string_view
    page;  // with {{title}}, {{style}}, {{data}} and {{script}} to be filled in, in this order
extern const std::string_view style;
extern const std::string_view script;

}  // namespace weft::draw::assets
