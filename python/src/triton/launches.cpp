// SPDX-License-Identifier: Apache-2.0
//
// A recorded call of GPU kernels (breccia/kernels/triton/plans.py), repeated without Python between its launches. The
// core links neither CUDA nor torch: the driver's function comes as an address, torch's allocator as a Python function.
#include <mutex>
#include <unordered_map>

#include "../register.hpp"

namespace breccia::python {
namespace {

// As cuda.h has them (CUlaunchAttribute and CUlaunchConfig), whose layout is part of the driver's binary interface.
struct Attribute {
    int id;
    int unused;
    union {
        unsigned char bytes[64];
        unsigned number[16];
    } value;
};
static_assert(sizeof(Attribute) == 72);

struct Config {
    unsigned grid[3], block[3], shared_memory;
    void* stream;
    const Attribute* attributes;
    unsigned attribute_count;
};
static_assert(sizeof(Config) == 56);

using LaunchKernel = int (*)(const Config*, void* function, void** parameters, void** extra);

constexpr std::size_t max_parameter_bytes = 4096, max_parameters = 256, max_slots = 64;
constexpr std::size_t map_bytes = 128, map_alignment = 64;  // a CUtensorMap
constexpr std::size_t max_maps = 64;                        // remembered for one parameter
constexpr std::uint64_t alignment = 16;                     // of the addresses that kernels are compiled for

using TensorMap = std::array<std::byte, map_bytes>;

std::uint64_t to_address(py::handle number) {
    const auto address = PyLong_AsUnsignedLongLong(number.ptr());
    if (address == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return address;
}

py::object checked(PyObject* made) {
    if (made == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(made);
}

bool is_true(const py::object& object) {
    const int found = PyObject_IsTrue(object.ptr());
    if (found < 0) throw py::error_already_set();
    return found != 0;
}

// Names of what is asked of every tensor.
struct Names {
    PyObject *data_ptr = PyUnicode_InternFromString("data_ptr"), *dtype = PyUnicode_InternFromString("dtype"),
             *shape = PyUnicode_InternFromString("shape"), *stride = PyUnicode_InternFromString("stride"),
             *get_device = PyUnicode_InternFromString("get_device"),
             *requires_grad = PyUnicode_InternFromString("requires_grad");
};

const Names& names() {
    static const Names made;
    return made;
}

py::object field(py::handle tensor, PyObject* name) { return checked(PyObject_GetAttr(tensor.ptr(), name)); }
py::object asked(py::handle tensor, PyObject* name) { return checked(PyObject_CallMethodNoArgs(tensor.ptr(), name)); }
std::uint64_t address_of(py::handle tensor) { return to_address(asked(tensor, names().data_ptr)); }

// An address in a kernel's parameters: `offset` bytes into operand, result or scratch memory number `slot`.
struct Place {
    std::size_t parameter, slot;
    std::uint64_t offset;
};

// TMA descriptors of one parameter, by the address that they describe.
class MapCache {
public:
    explicit MapCache(py::object encode) : encode_(std::move(encode)) {}

    TensorMap of(std::uint64_t address) {
        {
            const std::lock_guard lock(mutex_);
            if (const auto found = known_.find(address); found != known_.end()) return found->second;
        }
        const py::bytes encoded = encode_(address);  // no lock: Python may let another thread run here
        const std::string_view bytes(encoded);
        if (bytes.size() != map_bytes) throw_value("encode must return " + std::to_string(map_bytes) + " bytes");
        TensorMap made;
        std::memcpy(made.data(), bytes.data(), map_bytes);
        const std::lock_guard lock(mutex_);
        if (known_.size() >= max_maps) known_.clear();
        known_.insert_or_assign(address, made);
        return made;
    }

private:
    py::object encode_;
    std::mutex mutex_;
    std::unordered_map<std::uint64_t, TensorMap> known_;
};

struct Map {
    Place place;
    std::unique_ptr<MapCache> cache;
};

class Launch {
public:
    // parameters: bytes each, constant, or room for an address (8 bytes) or a map (128).
    Launch(std::uint64_t function, std::array<unsigned, 3> grid, unsigned threads, unsigned shared_memory,
           const std::vector<std::pair<int, std::vector<unsigned>>>& attributes, const py::list& parameters,
           const std::vector<std::tuple<std::size_t, std::size_t, std::uint64_t>>& pointers, const py::list& maps)
        : function_(reinterpret_cast<void*>(function)), grid_(grid), threads_(threads), shared_memory_(shared_memory) {
        for (const auto& [id, numbers] : attributes) {
            Attribute made{.id = id, .unused = 0, .value = {}};
            if (numbers.size() > std::size(made.value.number)) throw_value("an attribute has at most 16 numbers");
            std::copy(numbers.begin(), numbers.end(), made.value.number);
            attributes_.push_back(made);
        }
        for (const py::handle parameter : parameters) add_parameter(parameter.cast<std::string>());
        for (const auto& [parameter, slot, offset] : pointers)
            pointers_.push_back(place_of({parameter, slot, offset}, 8));
        for (const py::handle each : maps) {
            const auto [parameter, slot, offset, encode] =
                each.cast<std::tuple<std::size_t, std::size_t, std::uint64_t, py::object>>();
            maps_.push_back({place_of({parameter, slot, offset}, map_bytes), std::make_unique<MapCache>(encode)});
        }
    }

    [[nodiscard]] std::size_t slots() const {
        std::size_t most = 0;
        for (const Place& place : pointers_) most = std::max(most, place.slot + 1);
        for (const Map& map : maps_) most = std::max(most, map.place.slot + 1);
        return most;
    }

    // The driver's result.
    int run(LaunchKernel launch, void* stream, const std::uint64_t* addresses) const {
        alignas(map_alignment) std::byte values[max_parameter_bytes];
        std::memcpy(values, values_.data(), values_.size());
        for (const Place& place : pointers_) {
            const std::uint64_t address = addresses[place.slot] + place.offset;
            std::memcpy(values + starts_[place.parameter], &address, sizeof address);
        }
        for (const Map& map : maps_) {
            const TensorMap made = map.cache->of(addresses[map.place.slot] + map.place.offset);
            std::memcpy(values + starts_[map.place.parameter], made.data(), map_bytes);
        }
        void* parameters[max_parameters];
        for (std::size_t i = 0; i < starts_.size(); ++i) parameters[i] = values + starts_[i];
        const Config config{.grid = {grid_[0], grid_[1], grid_[2]},
                            .block = {threads_, 1, 1},
                            .shared_memory = shared_memory_,
                            .stream = stream,
                            .attributes = attributes_.data(),
                            .attribute_count = static_cast<unsigned>(attributes_.size())};
        const Released release;  // the driver waits where its queue is full
        return launch(&config, function_, parameters, nullptr);
    }

private:
    void add_parameter(std::string_view bytes) {
        const std::size_t align = bytes.size() == map_bytes ? map_alignment : 8;
        const std::size_t start = (values_.size() + align - 1) / align * align;
        if (start + bytes.size() > max_parameter_bytes || starts_.size() == max_parameters)
            throw_value("parameters must have at most " + std::to_string(max_parameter_bytes) + " bytes together");
        values_.resize(start + bytes.size());
        std::memcpy(values_.data() + start, bytes.data(), bytes.size());
        starts_.push_back(start);
        sizes_.push_back(bytes.size());
    }

    Place place_of(Place place, std::size_t size) const {
        if (place.parameter >= sizes_.size() || sizes_[place.parameter] != size)
            throw_value("parameter " + std::to_string(place.parameter) + " must have " + std::to_string(size) +
                        " bytes");
        return place;
    }

    void* function_;
    std::array<unsigned, 3> grid_;
    unsigned threads_, shared_memory_;
    std::vector<Attribute> attributes_;
    std::vector<std::byte> values_;
    std::vector<std::size_t> starts_, sizes_;
    std::vector<Place> pointers_;
    std::vector<Map> maps_;
};

// What a plan needs of torch and of the driver.
struct Machine {
    std::uint64_t launch;  // address of cuLaunchKernelEx
    py::object allocate;   // torch.empty_strided
    py::object stream;     // device index → its current stream
    py::object bind;       // device index: gives the calling thread its context
    py::object explain;    // error code → text
};

class LaunchPlan {
public:
    LaunchPlan(std::uint64_t launch, py::object allocate, py::object stream, py::object bind, py::object explain,
               py::object device, const py::list& results, py::object scratch, std::vector<std::uint64_t> offsets,
               const py::list& launches, py::object kept)
        : machine_{launch, std::move(allocate), std::move(stream), std::move(bind), std::move(explain)},
          device_(std::move(device)),
          index_(device_.attr("index")),
          scratch_(std::move(scratch)),
          offsets_(std::move(offsets)),
          kept_(std::move(kept)) {
        for (const py::handle each : results) results_.push_back(each.cast<py::tuple>());
        for (const py::handle each : launches) {
            launches_.push_back(each.cast<std::shared_ptr<Launch>>());
            slots_ = std::max(slots_, launches_.back()->slots());
        }
        if (slots_ > max_slots) throw_value("a plan has at most " + std::to_string(max_slots) + " slots");
    }

    // The results, or None where an operand's address is not aligned as the kernels want it.
    py::object run(const py::list& operands) const {
        std::array<std::uint64_t, max_slots> addresses{};
        const std::size_t given = operands.size(), count = given + results_.size() + offsets_.size();
        if (count > max_slots || slots_ > count) throw_value("operands must be those that the plan was recorded with");
        std::size_t slot = 0;
        std::uint64_t together = 0;
        for (const py::handle operand : operands) together |= addresses[slot++] = address_of(operand);
        if (together % alignment != 0) return py::none();
        bind_thread();
        py::list made(results_.size());
        for (std::size_t i = 0; i < results_.size(); ++i) {
            py::object tensor = allocate(results_[i]);
            addresses[slot++] = address_of(tensor);
            PyList_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(i), tensor.release().ptr());
        }
        py::object scratch;
        if (!scratch_.is_none()) {
            scratch = allocate(scratch_.cast<py::tuple>());
            const std::uint64_t start = address_of(scratch);
            for (const std::uint64_t offset : offsets_) addresses[slot++] = start + offset;
        }
        const auto stream = reinterpret_cast<void*>(to_address(machine_.stream(index_)));
        for (const auto& each : launches_) {
            const int code = each->run(reinterpret_cast<LaunchKernel>(machine_.launch), stream, addresses.data());
            if (code != 0) throw std::runtime_error(machine_.explain(code).cast<std::string>());
        }
        return made;
    }

private:
    // `result`: (size, stride, dtype).
    [[nodiscard]] py::object allocate(const py::tuple& result) const {
        static PyObject* const keywords = py::make_tuple(py::str("dtype"), py::str("device")).release().ptr();
        PyObject* arguments[] = {nullptr, PyTuple_GET_ITEM(result.ptr(), 0), PyTuple_GET_ITEM(result.ptr(), 1),
                                 PyTuple_GET_ITEM(result.ptr(), 2), device_.ptr()};
        return checked(
            PyObject_Vectorcall(machine_.allocate.ptr(), arguments + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, keywords));
    }

    // A thread's first call may lack a context of the device.
    void bind_thread() const {
        thread_local std::vector<bool> bound;
        const auto index = index_.cast<std::size_t>();
        if (index < bound.size() && bound[index]) return;
        machine_.bind(index_);
        bound.resize(std::max(bound.size(), index + 1));
        bound[index] = true;
    }

    Machine machine_;
    py::object device_, index_;
    std::vector<py::tuple> results_;
    py::object scratch_;  // of the same form as a result, or None
    std::vector<std::uint64_t> offsets_;
    std::vector<std::shared_ptr<Launch>> launches_;
    std::size_t slots_ = 0;
    py::object kept_;  // tensors whose addresses are constants of a launch
};

// A plan's call again, with another first operand of the same form and the other operands as a dict has them now.
class RepeatedCall {
public:
    RepeatedCall(std::shared_ptr<LaunchPlan> plan, py::object like, py::dict parts, py::tuple parts_names,
                 py::tuple unless, py::object wrapped, py::object current_device)
        : plan_(std::move(plan)),
          type_(py::type::of(like)),
          dtype_(field(like, names().dtype)),
          shape_(field(like, names().shape)),
          stride_(asked(like, names().stride)),
          device_(asked(like, names().get_device)),
          parts_(std::move(parts)),
          names_(std::move(parts_names)),
          unless_(std::move(unless)),
          wrapped_(std::move(wrapped)),
          current_device_(std::move(current_device)) {
        for (const py::handle name : names_) known_.push_back(parts_[name]);
    }

    // The call's only result, or None where it is not certain that the plan gives it.
    py::object run(py::handle x) const {
        if (!is_alike(x) || !is_quiet(x)) return py::none();
        py::list operands;
        operands.append(x);
        for (std::size_t i = 0; i < known_.size(); ++i) {
            PyObject* part = PyDict_GetItemWithError(parts_.ptr(), PyTuple_GET_ITEM(names_.ptr(), i));
            if (part != known_[i].ptr()) return py::none();
            if (part != Py_None) operands.append(py::handle(part));
        }
        py::object made = plan_->run(operands);
        if (made.is_none()) return made;
        return py::reinterpret_borrow<py::object>(PyList_GET_ITEM(made.ptr(), 0));
    }

private:
    [[nodiscard]] bool is_alike(py::handle x) const {
        return py::type::handle_of(x).is(type_) && field(x, names().dtype).is(dtype_) &&
               field(x, names().shape).equal(shape_) && asked(x, names().stride).equal(stride_) &&
               asked(x, names().get_device).equal(device_);
    }

    // Whether torch need not see the call: no gradient, mode or transform, and the device is the current one.
    [[nodiscard]] bool is_quiet(py::handle x) const {
        if (is_true(field(x, names().requires_grad)) || is_true(wrapped_(x)) || !current_device_().equal(device_))
            return false;
        return std::none_of(unless_.begin(), unless_.end(), [](py::handle ask) { return is_true(ask()); });
    }

    std::shared_ptr<LaunchPlan> plan_;
    py::object type_, dtype_, shape_, stride_, device_;
    py::dict parts_;
    py::tuple names_;
    std::vector<py::object> known_;
    py::tuple unless_;
    py::object wrapped_, current_device_;
};

}  // namespace

void register_launches(py::module_& m) {
    py::class_<Launch, std::shared_ptr<Launch>>(m, "Launch")
        .def(py::init<std::uint64_t, std::array<unsigned, 3>, unsigned, unsigned,
                      const std::vector<std::pair<int, std::vector<unsigned>>>&, const py::list&,
                      const std::vector<std::tuple<std::size_t, std::size_t, std::uint64_t>>&, const py::list&>(),
             py::kw_only(), py::arg("function"), py::arg("grid"), py::arg("threads"), py::arg("shared_memory"),
             py::arg("attributes"), py::arg("parameters"), py::arg("pointers"), py::arg("maps"));
    py::class_<LaunchPlan, std::shared_ptr<LaunchPlan>>(m, "LaunchPlan")
        .def(py::init<std::uint64_t, py::object, py::object, py::object, py::object, py::object, const py::list&,
                      py::object, std::vector<std::uint64_t>, const py::list&, py::object>(),
             py::kw_only(), py::arg("launch"), py::arg("allocate"), py::arg("stream"), py::arg("bind"),
             py::arg("explain"), py::arg("device"), py::arg("results"), py::arg("scratch"), py::arg("offsets"),
             py::arg("launches"), py::arg("kept"))
        .def("run", &LaunchPlan::run, py::arg("operands"));
    py::class_<RepeatedCall>(m, "RepeatedCall")
        .def(
            py::init<std::shared_ptr<LaunchPlan>, py::object, py::dict, py::tuple, py::tuple, py::object, py::object>(),
            py::kw_only(), py::arg("plan"), py::arg("like"), py::arg("parts"), py::arg("names"), py::arg("unless"),
            py::arg("wrapped"), py::arg("current_device"))
        .def("run", &RepeatedCall::run, py::arg("x"));
}

}  // namespace breccia::python
