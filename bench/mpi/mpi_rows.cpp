// Strided rows between two ranks over MPI, both ways at once: as they lie (MPI datatypes, which the communicator uses),
// packed into a buffer, sent and unpacked, and for comparison as many bytes that are contiguous.
//   tools/mpirun.sh -np 2 build/release/bench/mpi/mpi_rows
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "comm/blocks.h"
#include "index.h"
#include "weft/mpi.h"

namespace {

using weft::Block, weft::Index;

struct Shape {
  Index rows, bytes, stride;
};

double seconds(const std::function<void()>& call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void bench(weft::Communicator& comm, const Shape& shape, int repeats) {
  const Index peer = 1 - comm.rank(), size = shape.rows * shape.bytes;
  std::vector<char> from(weft::at(shape.rows * shape.stride), 1), to(from);
  std::vector<char> packed_from(weft::at(size), 1), packed_to(packed_from);
  const auto rows = [&](std::vector<char>& x) {
    return Block{.data = x.data(), .rows = shape.rows, .bytes = shape.bytes, .row_stride = shape.stride};
  };
  const auto whole = [&](std::vector<char>& x) { return Block{.data = x.data(), .rows = 1, .bytes = size}; };
  const auto pass = [&](const Block& sent, const Block& received) {
    comm.send_receive(peer, sent, peer, received).wait();
  };
  const std::array<std::function<void()>, 3> ways{
      [&] { pass(rows(from), rows(to)); },
      [&] {
        weft::move_blocks(std::array{rows(from)}, std::array{whole(packed_from)}, weft::Message::Combine::replace);
        pass(whole(packed_from), whole(packed_to));
        weft::move_blocks(std::array{whole(packed_to)}, std::array{rows(to)}, weft::Message::Combine::replace);
      },
      [&] { pass(whole(packed_from), whole(packed_to)); }};
  std::array<std::vector<double>, 3> times;
  for (int i = 0; i < repeats; ++i) {
    for (std::size_t way = 0; way < ways.size(); ++way) {  // in turn, so that a slow moment meets all
      double meet = 0;
      comm.all_reduce(&meet, weft::DType::f64, 1, weft::Reduce::sum).wait();
      double time = seconds(ways[way]);
      comm.all_reduce(&time, weft::DType::f64, 1, weft::Reduce::max).wait();
      times[way].push_back(time);
    }
  }
  if (comm.rank() != 0) return;
  std::printf("%6td rows of %5td bytes at %5td", shape.rows, shape.bytes, shape.stride);
  for (std::vector<double>& t : times) {
    std::sort(t.begin(), t.end());
    std::printf(" | %8.3f %8.3f", t[t.size() / 10] * 1e3, t[t.size() / 2] * 1e3);
  }
  std::printf("\n");
}

}  // namespace

int main(int argc, char** argv) {
  const int repeats = argc > 1 ? std::atoi(argv[1]) : 200;
  weft::run_mpi([&](weft::Communicator& comm) {
    if (comm.ranks() != 2) throw std::runtime_error("run it on two ranks");
    if (comm.rank() == 0) std::printf("ms, best tenth and median: as they lie | packed | contiguous\n");
    for (const Shape& shape : {Shape{4096, 1024, 4096},
                               {1024, 4096, 8192},
                               {4096, 128, 512},
                               {4096, 32, 256},
                               {256, 1024, 4096},
                               {16, 1024, 4096}})
      bench(comm, shape, repeats);
  });
}
