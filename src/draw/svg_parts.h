// The parts of a panel in a picture. Classes: r0.. and p0.. are ranks' colours and their pale forms, s0.. and t0..
// steps'.
#pragma once

#include "draw/ink.h"
#include "draw/scene.h"

namespace weft::draw {

// Queries from top to bottom, keys from left to right, with owners along both sides, in the box.
void draw_matrix(const Scene& scene, const Panel& panel, const Box& box, Ink& ink);

// What all panels share, so that they can be compared.
struct Scales {
  double work = 0, bytes = 0, time = 0;
};
Scales scales_of(const Scene& scene);

// Each draws from `at` down, as wide as given, and returns its height.
double draw_bars(const Scene& scene, const Panel& panel, const Scales& scales, Point at, double width, Ink& ink);
double draw_times(const Panel& panel, const Scales& scales, Point at, double width, Ink& ink);

double text_width(std::string_view text);  // about, at the size of the labels
double round_step(double least);           // 1, 2 or 5 times a power of ten, at least this

}  // namespace weft::draw
