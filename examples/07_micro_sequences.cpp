// A pack of documents in four micro-sequences on two ranks: one K/V buffer, a quarter of the queries at a time.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <vector>

#include <weft/weft.h>

int main() {
  using weft::DType, weft::Index;
  const std::vector<Index> documents{300, 20, 180, 500, 77};
  const weft::Packs packs = weft::pack_documents(documents, {.budget = 1024});
  std::printf("%td packs, waste %.1f %%\n", packs.report.packs, 100 * packs.report.waste);
  const Index ranks = 2, micros = 4, heads_q = 4, heads_k = 2, dim = 32;
  std::atomic<int> wrong = 0;

  weft::run_ranks(ranks, [&](weft::Communicator& comm) {
    // Taken once, for every pack and every step; a layer has one.
    weft::KvBuffer buffer(comm, {.rows = 1024, .heads = heads_k, .dim_qk = dim, .dim_v = dim});
    for (Index pack = 0; pack < packs.report.packs; ++pack) {
      const weft::MicroSequences sequence(
          packs.stream(pack), {.ranks = ranks, .micros = micros, .remainder = weft::MicroSplit::Remainder::pad});
      const Index rows = sequence.local();
      const auto view = [&](std::vector<float>& x, Index heads) {
        return weft::thd(x.data(), DType::f32, rows, heads, dim);
      };
      const auto lse_view = [&](std::vector<float>& x) {
        return weft::token_heads(x.data(), DType::f32, rows, heads_q);
      };
      std::vector<float> q(rows * heads_q * dim), k(rows * heads_k * dim, 1.0f), v(k), dq(q), dk(k), dv(k), dout(q);
      std::vector<std::vector<float>> out(micros, q), lse(micros, std::vector<float>(rows * heads_q));

      buffer.begin(sequence, {.causal = true});
      for (Index m = 0; m < micros; ++m) {  // q = 0: a token at position p sees p + 1 keys alike
        buffer.forward(m, {.q = view(q, heads_q),
                           .k = view(k, heads_k),
                           .v = view(v, heads_k),
                           .out = view(out[m], heads_q),
                           .lse = lse_view(lse[m])});
        const weft::Window window = sequence.window(comm.rank(), m);
        const std::vector<Index> position = window.position_index(), entry = window.document_index_q();
        for (Index row = 0; row < rows; ++row) {
          if (window.documents[entry[row] - 1] == weft::kNoDocument) continue;
          const double keys = static_cast<double>(position[row] + 1);
          if (std::abs(static_cast<double>(lse[m][row * heads_q]) - std::log(keys)) > 1e-5) ++wrong;
        }
      }
      for (Index m = micros; m-- > 0;)
        buffer.backward(m, {.q = view(q, heads_q),
                            .dout = view(dout, heads_q),
                            .out = view(out[m], heads_q),
                            .lse = lse_view(lse[m]),
                            .dq = view(dq, heads_q),
                            .dk = view(dk, heads_k),
                            .dv = view(dv, heads_k)});
    }
    if (comm.rank() == 0) std::printf("the buffer of a rank: %td KiB\n", buffer.use().bytes_held / 1024);
  });
  std::printf("%d wrong\n", wrong.load());
  return wrong == 0 ? 0 : 1;
}
