// SPDX-License-Identifier: Apache-2.0
#include "breccia/compare.hpp"
#include "register.hpp"

namespace breccia::python {
namespace {

py::dict to_dict(const Comparison& c) {
    py::dict result;
    result["count"] = c.count;
    result["signal"] = c.signal;
    result["other"] = c.other;
    result["dot"] = c.dot;
    result["noise"] = c.noise;
    result["max_error"] = c.max_error;
    result["max_error_at"] = c.max_error_at;
    result["reference_nans"] = c.reference_nans;
    result["nans"] = c.nans;
    result["equal"] = c.equal;
    result["sqnr_db"] = c.sqnr_db();
    result["cosine"] = c.cosine();
    return result;
}

py::dict to_dict(const Magnitudes& m) {
    py::dict result;
    result["first"] = Magnitudes::first;
    result["counts"] = py::array_t<std::int64_t>(Magnitudes::size, m.counts.data());
    result["zeros"] = m.zeros;
    result["not_finite"] = m.not_finite;
    result["largest"] = m.largest;
    return result;
}

}  // namespace

void register_compare(py::module_& m) {
    m.def("compare", [](py::handle reference, py::handle tensor) {
        const PyOperand x(reference, "reference", true), y(tensor, "tensor", true);
        return to_dict(released([&] { return compare(x.get(), y.get()); }));
    });
    m.def("magnitudes", [](py::handle x) {
        const PyOperand operand(x, "x", true);
        return to_dict(released([&] { return magnitudes(operand.get()); }));
    });
    m.def("error_magnitudes", [](py::handle reference, py::handle tensor, float unit) {
        const PyOperand x(reference, "reference", true), y(tensor, "tensor", true);
        return to_dict(released([&] { return error_magnitudes(x.get(), y.get(), unit); }));
    });
    m.def("count_codes", [](const ScaledTensor& scaled) {
        const auto counts = released([&] { return count_codes(scaled); });
        return py::array_t<std::int64_t>(static_cast<py::ssize_t>(counts.size()), counts.data());
    });
}

}  // namespace breccia::python
