// A child process that times another library. Questions and answers are JSON, one line each.
//   {"do": "hello"}                                       -> {"name": "torch", "version": "2.8.0"}
//   {"do": "prepare", "what": "sdpa", "threads": 2, ..}   -> {"id": 0} or {"refused": "why"}
//   {"do": "time", "id": 0, "threads": 2}                 -> {"seconds": 0.0123}, one call
//   {"do": "forget"}                                      -> {}; frees what was prepared
// It works only between a question and its answer, never at the same time as Weft.
#pragma once

#include <optional>
#include <string>

#include <nlohmann/json_fwd.hpp>
#include <sys/types.h>

#include "bench/case.h"

namespace weft::tool {

class Peer {
 public:
  explicit Peer(const std::string& command);  // for the shell
  ~Peer();
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  const std::string& name() const { return name_; }
  const std::string& version() const { return version_; }

  // None if the peer refuses, which is then said on stderr.
  std::optional<int> prepare(const BenchTask& task, const Rival& rival, int threads);
  std::optional<int> prepare_gemm(DType dtype, Index size, int threads);
  // On the GPU: a question's own words; "do" and "device" are added.
  std::optional<int> prepare_gpu(nlohmann::json question);
  double time(int id, int threads);
  void forget();

 private:
  nlohmann::json ask(const nlohmann::json& question);
  std::optional<int> prepare(const nlohmann::json& question);
  std::string read_line();
  [[noreturn]] void fail(const std::string& what);

  std::string command_, name_, version_, unread_;
  pid_t pid_ = -1;
  int to_ = -1, from_ = -1;
};

}  // namespace weft::tool
