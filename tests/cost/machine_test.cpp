// Machines: presets, files, and tiles counted.
#include <map>
#include <set>

#include <gtest/gtest.h>

#include "check/cases/random_case.h"
#include "cost/tiles.h"
#include "index.h"
#include "refusal.h"
#include "weft/cost.h"
#include "weft/models.h"

namespace weft::test {
namespace {

TEST(Machine, PresetsAreRightAndSayWhereNumbersComeFrom) {
  for (const Machine& m : machine_presets()) {
    EXPECT_NO_THROW(check_machine(m)) << m.name;
    EXPECT_FALSE(m.source.empty()) << m.name;
    for (const KernelRate& k : m.kernels) EXPECT_FALSE(k.source.empty()) << m.name;
    for (const Level& l : m.levels) EXPECT_FALSE(l.source.empty()) << m.name;
  }
}

TEST(Machine, FilesSayTheSame) {
  for (const Machine& m : machine_presets()) {
    const std::string text = to_json(m);
    const Machine again = machine_from_json(text, "file");
    EXPECT_EQ(to_json(again), text) << m.name;
    EXPECT_EQ(again.kernels.size(), m.kernels.size());
    EXPECT_EQ(again.levels[0].bandwidth, m.levels[0].bandwidth);
    EXPECT_EQ(again.kernels[0].tile_seconds, m.kernels[0].tile_seconds);
  }
}

void expect_error(const std::string& json, const std::string& says) {
  expect_refusal([&] { machine_from_json(json, "m.json"); }, {says, "m.json"});
}

TEST(Machine, WrongFilesAreRefusedWithThePlace) {
  const std::string good = to_json(machine_preset("cpu"));
  expect_error("", "ends too early");
  expect_error("{\n\n\"name\": nothing}", "line 3");
  expect_error("{\"name\": \"a\", \"name\": \"b\"}", "comes twice");
  expect_error("{\"name\": [1]}", "name is no string");
  expect_error("{\"kernels\": [{\"speed\": 1}]}", "kernels[0].speed is not known");
  expect_error("{\"kernels\": [{\"dim\": 1.5}]}", "kernels[0].dim is 1.5");
  expect_error(std::string(100, '['), "deeper than 8");
  expect_error(std::string(2 << 20, ' '), "has 2097152 bytes");
  expect_error(good + "x", "something follows");
  expect_error("{\"levels\": [{}], \"kernels\": [{\"flops\": 0}]}", "flops is 0");
  expect_error("{\"levels\": [{\"interference\": 1}], \"kernels\": [{\"flops\": 1}]}", "interference is 1");
  expect_error("{\"levels\": [{\"ranks\": 8}], \"kernels\": [{\"flops\": 1}]}", "the last level joins all");
  expect_error("{\"levels\": [{\"ranks\": 8}, {\"ranks\": 12}, {}], \"kernels\": [{\"flops\": 1}]}", "multiple");
  expect_error("{\"kernels\": [{\"flops\": 1e999}]}", "no value");
  for (std::size_t cut = 1; cut < good.size(); cut += 37) expect_error(good.substr(0, cut), "m.json");
}

// Ranks of one context-parallel group beside tensor parallelism: every so many-th GPU.
TEST(Machine, StridedRanksShareFewerNodes) {
  Machine m = machine_preset("h100-400g");
  m.levels[1].uplink = 80e9;
  EXPECT_EQ(to_json(tensor_parallel(m, 1)), to_json(m));
  for (const auto& [degree, ranks, uplink] : {std::tuple{2, 4, 40e9}, {8, 1, 10e9}, {16, 1, 10e9}}) {
    const Machine apart = tensor_parallel(m, degree);
    EXPECT_EQ(apart.levels[0].ranks, ranks) << degree;
    EXPECT_EQ(apart.levels[1].ranks, 0) << degree;
    EXPECT_EQ(apart.levels[1].uplink, uplink) << degree;
    EXPECT_EQ(apart.levels[0].bandwidth, m.levels[0].bandwidth) << degree;
    EXPECT_NO_THROW(check_machine(apart)) << degree;
  }
  EXPECT_THROW(tensor_parallel(m, 3), Error);
  EXPECT_THROW(tensor_parallel(m, 0), Error);
  EXPECT_THROW(tensor_parallel(machine_preset("cpu"), 2), Error);
}

TEST(Models, SayTheirLayersAndWhereTheyComeFrom) {
  const std::map<std::string_view, Index> layers = {
      {"llama3-70b", 80}, {"llama4-scout", 48}, {"gpt-oss-120b", 36}, {"deepseek-v3", 61}, {"qwen3-235b", 94}};
  EXPECT_EQ(models().size(), layers.size());
  for (const Model& m : models()) {
    EXPECT_EQ(m.layer_count(), layers.at(m.name)) << m.name;
    EXPECT_EQ(&model(m.name), &m);
    EXPECT_EQ(m.heads_q % m.heads_k, 0) << m.name;
    EXPECT_FALSE(m.source.empty()) << m.name;
    for (const ModelLayers& l : m.layers) EXPECT_TRUE(l.mask.causal) << m.name;
  }
  // A window of 128 keys has the query's own among them.
  EXPECT_EQ(
      Problem(Stream::from_lengths(std::vector<Index>{1000}), model("gpt-oss-120b").layers[0].mask).visible_pairs(),
      128 * 1000 - 128 * 127 / 2);
  EXPECT_THROW(model("llama5"), Error);
}

TEST(Machine, RatesByDtypeAndWidth) {
  const Machine& m = machine_preset("h100-400g");
  EXPECT_EQ(kernel_rate(m, Pass::forward, {.dtype = DType::bf16, .dim_qk = 128, .dim_v = 128}).dim, 128);
  EXPECT_EQ(kernel_rate(m, Pass::backward, {.dtype = DType::f16, .dim_qk = 72, .dim_v = 72}).dim, 64);
  EXPECT_EQ(kernel_rate(m, Pass::forward, {.dtype = DType::f32, .dim_qk = 16, .dim_v = 16}).dtype, DType::f32);
  EXPECT_THROW(kernel_rate(m, Pass::forward, {.dtype = DType::f64, .dim_qk = 16, .dim_v = 16}), Error);
}

TEST(Tiles, CountedAsKernelsWalkThem) {
  const KernelRate rate{.flops = 1, .tile_q = 4, .tile_k = 8};
  // 10 rows of 2 heads that share a K/V head: tiles of 2 tokens. All of 16 keys: 5 x 2 tiles.
  const Slice full{0, 10, 0, 16};
  const TileWork w = tile_work({&full, 1}, 2, 1, rate);
  EXPECT_EQ(w.pairs, 2 * 160);
  EXPECT_EQ(w.tiles, 5);
  EXPECT_EQ(w.covered, 2 * 5 * 2 * 16);
  EXPECT_EQ(w.rows, 20);
  EXPECT_EQ(w.longest, 2 * 2 * 16);
  // Causal: the first tile sees keys 0 and 1, the last one 0 to 9.
  const Slice causal{0, 10, 0, 10, -kUnlimited, 0};
  EXPECT_EQ(tile_work({&causal, 1}, 2, 1, rate).covered, 2 * 2 * 8 * (1 + 1 + 1 + 1 + 2));
  EXPECT_EQ(tile_work({}, 2, 1, rate).pairs, 0);
}

// Rectangles, which are counted at once, among slices that a band cuts: pair by pair the same.
TEST(Tiles, EveryTileOfManySlices) {
  check::RandomChoices c(3);
  for (int round = 0; round < 300; ++round) {
    const KernelRate rate{.flops = 1, .tile_q = c.pick(1, 9), .tile_k = c.pick(1, 5), .copy_rows = c.pick(0, 12)};
    const Index group = c.pick(1, 3), tokens = max_of(1, rate.tile_q / group);
    const Index copy_tokens = max_of(1, rate.copy_rows / group);
    std::vector<Slice> slices;
    std::map<Index, double> by_tile;
    double covered = 0, pairs = 0, keys = 0;
    std::set<Index> rows;
    for (Index n = c.pick(1, 5); n > 0; --n) {
      Slice s{c.pick(0, 20), 0, c.pick(0, 20), 0};
      s.q_end = s.q_begin + c.pick(1, 20);
      s.k_end = s.k_begin + c.pick(1, 20);
      if (c.one_in(2)) s.hi = c.pick(-5, 10);
      if (c.one_in(3)) s.lo = c.pick(-30, 0);
      s = trimmed(s, true);
      if (s.q_begin >= s.q_end) continue;
      slices.push_back(s);
      std::map<std::pair<Index, Index>, bool> met;     // tiles of rows and of keys
      std::map<std::pair<Index, Index>, bool> copied;  // keys for blocks of rows
      for (Index q = s.q_begin; q < s.q_end; ++q)
        for (Index k = s.k_begin; k < s.k_end; ++k) {
          if (k - q < s.lo || k - q > s.hi) continue;
          ++pairs;
          rows.insert(q);
          met[{q / tokens, (k - s.k_begin) / rate.tile_k}] = true;
          copied[{q / copy_tokens, k}] = true;
        }
      if (rate.copy_rows > 0) keys += static_cast<double>(copied.size());
      for (const auto& [tile, yes] : met) {
        by_tile[tile.first] += static_cast<double>(tokens * rate.tile_k);
        covered += static_cast<double>(tokens * rate.tile_k);
      }
    }
    double longest = 0;
    for (const auto& [tile, sum] : by_tile) longest = std::max(longest, sum);
    const TileWork got = tile_work(slices, group, 1, rate);
    ASSERT_EQ(got.pairs, pairs * static_cast<double>(group)) << round;
    ASSERT_EQ(got.covered, covered * static_cast<double>(group)) << round;
    ASSERT_EQ(got.longest, longest * static_cast<double>(group)) << round;
    ASSERT_EQ(got.keys, keys) << round;
    ASSERT_EQ(got.rows, static_cast<double>(rows.size() * at(group))) << round;
  }
}

TEST(Tiles, RoughCountsAreNear) {
  const KernelRate rate{.flops = 1, .tile_q = 128, .tile_k = 128, .copy_rows = 512};
  for (const Slice& s : {Slice{0, 8000, 0, 8000, -kUnlimited, 0}, Slice{100, 9000, 0, 4000},
                         Slice{0, 5000, 0, 5000, -900, 0}, Slice{0, 3000, 2000, 9000, -kUnlimited, 3000}}) {
    cost::TileCounter exact(8, 1, rate), rough(8, 1, rate);
    exact.add(s, 0);
    rough.add_roughly(s);
    const TileWork a = exact.take(), b = rough.take();
    EXPECT_EQ(a.pairs, b.pairs);
    EXPECT_NEAR(b.covered / a.covered, 1, 0.08);
    EXPECT_NEAR(b.longest / a.longest, 1, 0.25);
    EXPECT_EQ(a.rows, b.rows);
    EXPECT_NEAR(b.keys / a.keys, 1, 0.1);
  }
}

// Documents that lie beside each other are no long tile.
TEST(Tiles, ManyShortSlicesStayShort) {
  const KernelRate rate{.flops = 1, .tile_q = 128, .tile_k = 128};
  cost::TileCounter exact(8, 1, rate), rough(8, 1, rate);
  for (Index n = 0; n < 100; ++n) {
    const Slice s{48 * n, 48 * (n + 1), 48 * n, 48 * (n + 1), -kUnlimited, 0};
    exact.add(s, 0);
    rough.add_roughly(s);
  }
  const TileWork a = exact.take(), b = rough.take();
  EXPECT_EQ(a.longest, b.longest);
  EXPECT_EQ(a.covered, b.covered);
}

TEST(MachineFile, TakesEscapedCharacters) {
  const auto named = [](const std::string& name) {
    return R"({"name": ")" + name + R"(", "levels": [{"bandwidth": 1e11}], "kernels": [{"flops": 1e14}]})";
  };
  EXPECT_EQ(machine_from_json(named(R"(a\u0041\u00fc\u20ac\ud83d\ude00z)"), "m.json").name, "aAü€😀z");
  EXPECT_EQ(machine_from_json(named(R"(a\u000az)"), "m.json").name, "a z");
  for (const char* half : {R"(\ud83d)", R"(\ud83dx)", R"(\ud83d\u0041)", R"(\ude00)"})
    expect_error(named(half), "half of a surrogate pair");
  for (const char* wrong : {R"(\u12)", R"(\u12g4)", R"(\u+123)", R"(\u)"})
    expect_error(named(wrong), "four hexadecimal digits");
}

}  // namespace
}  // namespace weft::test
