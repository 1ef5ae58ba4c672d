#include "draw/scene.h"
namespace weft::draw { std::string svg(const Scene&) { return ""; } }
