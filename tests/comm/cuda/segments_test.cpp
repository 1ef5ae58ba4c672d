// Lists of blocks as segments: the same bytes, whatever both sides are cut into. Needs no GPU.
#include "comm/cuda/segments.h"

#include <cstring>

#include "comm/letters.h"
#include "index.h"

namespace weft::test {
namespace {

void move_all(const std::vector<cuda::Segment>& all) {
  for (const cuda::Segment& s : all)
    for (Index row = 0; row < s.rows; ++row)
      std::memcpy(s.to + row * s.to_stride, s.from + row * s.from_stride, at(s.bytes));
}

TEST(Segments, HoldTheBytesOfRandomBlocks) {
  for (std::uint64_t seed = 0; seed < 20000; ++seed) {
    Random random(seed);
    const Index unit = below(random, 2) == 0 ? 1 : 4, size = below(random, 600) / unit * unit;
    std::vector<char> message;
    for (Index i = 0; i < size; ++i) message.push_back(static_cast<char>(below(random, 256)));
    Pieces from(random, size, unit), to(random, size, unit);
    from.write(message);
    move_all(cuda::segments(from.blocks, to.blocks));
    ASSERT_EQ(to.read(), message) << "seed " << seed;
    ASSERT_TRUE(to.elsewhere_untouched()) << "seed " << seed;
  }
}

// Some heads of many rows, into rows side by side and into rows apart: one segment, found without going through rows.
TEST(Segments, OfManyRowsAreFew) {
  constexpr Index kRows = 100'000;
  std::vector<char> memory(at(kRows * 64));
  const Block strided{memory.data(), kRows, 2, 8, 64, 8}, rows{memory.data(), kRows, 1, 16, 16, 16};
  for (const auto& [from, to] : {std::pair{strided, rows}, {rows, strided}, {strided, strided}, {rows, rows}}) {
    const std::vector<cuda::Segment> all = cuda::segments({&from, 1}, {&to, 1});
    ASSERT_EQ(all.size(), 1U);
    EXPECT_EQ(all[0].rows * all[0].bytes, kRows * 16);
  }
  const Block heads{memory.data(), kRows / 2, 2, 8, 64, 32};  // two heads that do not lie side by side
  const Block half{memory.data(), kRows / 2, 1, 16, 16, 16};
  EXPECT_LE(cuda::segments({&heads, 1}, {&half, 1}).size(), at(kRows / 2));
}

}  // namespace
}  // namespace weft::test
