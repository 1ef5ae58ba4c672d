// A rank's rows of a whole tensor: those without a token are zeros, whatever was there.
#include <vector>

#include <gtest/gtest.h>

#include "index.h"
#include "weft/layout.h"
#include "weft/rows.h"

namespace weft {
namespace {

TEST(Shard, RowsWithoutATokenBecomeZeros) {
  const Stream stream = Stream::from_lengths(std::vector<Index>{5, 6});  // 11 tokens: zigzag pads the end of the pack
  const Layout layout = Layout::zigzag(stream, 2);
  std::vector<float> whole(at(stream.tokens()), 1.0F);
  Index zeros = 0;
  for (Index rank = 0; rank < 2; ++rank) {
    std::vector<float> local(at(layout.rows()), 7.0F);
    layout.shard(rank, {whole.data(), stream.tokens(), sizeof(float), sizeof(float)},
                 {local.data(), layout.rows(), sizeof(float), sizeof(float)});
    const std::vector<Index> tokens = layout.tokens(rank);
    for (std::size_t row = 0; row < local.size(); ++row) {
      EXPECT_EQ(local[row], tokens[row] == kNoToken ? 0.0F : 1.0F);
      zeros += tokens[row] == kNoToken ? 1 : 0;
    }
  }
  EXPECT_GT(zeros, 0);
}

}  // namespace
}  // namespace weft
